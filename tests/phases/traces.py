"""What a healthy trainer leaves: every file of a launch, made by hand.

Everything follows from the plan itself (steps, arms, toggles), so a healthy run of a profile is
what its trainer would have left, in numbers that are easy to reason about.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsa import contract
from runbook.config import Profile
from runbook.records import Begun, Launch, LaunchResult, LaunchStatus, RankExit, Stopped
from runbook.records.evidence import JUnitCase, JUnitReport, LaunchEvidence, TrainingLog
from tests.factory.files import write_beats
from tests.factory.ranks import records
from tests.phases import machine_files
from tests.phases.trainer import ENTROPY, FLOOR, HEALTHY, SHA, TOKEN, digest_of, env, package, ranks


def frame(
    launch: Launch, profile: Profile, *, rate: float = 1e5, rates: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """One row per step at exactly `rate` tok/s, or at the rate of each arm."""
    tokens = profile.workload_of(launch.phase).tokens_per_step
    rows: list[tuple[str, int, bool]] = []
    if (plan := launch.schedule) is None:
        rows = [("", 0, False)] * (launch.steps - launch.after)
    for arm, block in (
        [(arm, b) for b, order in enumerate(plan.rounds) for arm in order] if plan else []
    ):
        rows += [(arm, block, True)] * plan.warmup_steps + [(arm, block, False)] * plan.steps
    speeds = np.array([(rates or {}).get(arm, rate) for arm, _, _ in rows])
    noise = np.random.default_rng(7).normal(0, 0.004, len(rows))
    return pd.DataFrame(
        {
            "step": np.arange(1, len(rows) + 1) + launch.after,
            "loss": (_learned(len(rows)) if "markov" in launch.argv else FLOOR + 0.02) + noise,
            "lr": 2e-4,
            "toks_per_s": speeds,
            "tokens": tokens,
            "dt_s": tokens / speeds,
            "grad_norm": 1.0,
            "mem_mib": 30_000.0 if profile.has_gpu else 300.0,
            "arm": [arm for arm, _, _ in rows],
            "block": [block for _, block, _ in rows],
            "warmup": [warmup for _, _, warmup in rows],
            "fetch_s": 0.001,
        }
    )


def _learned(steps: int) -> Any:
    """From knowing nothing most of the way to the entropy rate, in a tenth of the steps."""
    share = np.minimum(1.0, np.arange(steps) / max(1, steps // 10))
    return FLOOR - 0.9 * share * (FLOOR - ENTROPY)


def gates(
    steps: int, *, after: int = 0, entropy: float = 0.95, max_gate: float = 0.4
) -> pd.DataFrame:
    """Gate health at the first and every tenth step; the last digits of readings differ."""
    at = np.arange(after, after + max(steps - after, 50) + 1, 10)
    at[0] += 1
    entropies, largest = entropy + 1e-12 * at, np.full(len(at), max_gate)
    means = {"entropy_mean": entropies, "max_gate_mean": largest}  # all layers are alike
    return pd.DataFrame({"step": at, "entropy": entropies, "max_gate": largest, **means})


AUDIT = {"cmp": "explicit_softmax", "sel": "flash", "win": "flash"}
_NO_FLASH = {"cmp": "explicit_softmax", "sel": "efficient", "win": "efficient"}


def audit(kernels: Mapping[str, str] = AUDIT) -> dict[str, Any]:
    """An audit in which the default arm ran `kernels`."""
    arms = {"default": kernels, "flash_only": AUDIT, "no_flash": _NO_FLASH}

    def ran(found: Mapping[str, str]) -> dict[str, Any]:
        return {branch: {"kernel": name, "ops": {}} for branch, name in found.items()}

    return {"arms": {arm: {"branches": ran(found)} for arm, found in arms.items()}}


def junit(name: str, run_dir: str, device: str) -> JUnitReport:
    """All of a test launch's tests passed."""
    cases = tuple(
        JUnitCase(name=test, classname=module, status="passed", properties={"device": device})
        for module, test in HEALTHY["tests"][name]
    )
    return JUnitReport(path=f"{run_dir}/junit.xml", sha256=SHA, cases=cases)


def checkout(launch: Launch) -> dict[str, Any]:
    """What the harness found in the checkout that it made."""
    there = {"commit": launch.commit, "sha": launch.commit, "changed": []}
    return {"schema_version": 1, **there, **package(launch)}


# What a launch leaves beside its log, heartbeats and results of tests, by the name of its field.
_FILES = {
    "console": "console.log",
    "gates": "gates.csv",
    "checkout": "checkout.json",
    "env": "env.json",
    "audit": "sdpa_audit.json",
    "profile": "profile_rank0.json",
    "trace": "trace_rank0.json.gz",
    "gpu_samples": "gpu_samples.csv",
    "devices_before": "devices_before.json",
    "devices_after": "devices_after.json",
    "kernel_log": "kernel_log.json",
    "load": "load.json",
}


_made: dict[str, LaunchEvidence] = {}


def healthy(launch: Launch, profile: Profile, **speed: Any) -> LaunchEvidence:
    """A launch that ran well; `rate` and `rates` as in `frame`. Nobody changes what is in it.

    Most tests spoil one launch of several that they have in common: each is made once.
    """
    key = f"{launch.model_dump_json()} {profile.model_dump_json()} {speed}"
    if key not in _made:
        _made[key] = _healthy(launch, profile, **speed)
    return _made[key]


def _healthy(launch: Launch, profile: Profile, **speed: Any) -> LaunchEvidence:
    where = launch.run_dir
    done = LaunchResult(
        status=LaunchStatus.COMPLETED,
        exit_code=0,
        run_token=TOKEN,
        started_at=machine_files.STARTED_AT,
    )
    base = LaunchEvidence(
        launch=launch,
        result=done,
        files={kind: (f"{where}/{name}", SHA) for kind, name in _FILES.items()},
        console_lines=("[ddp] gradient compression enabled: bf16",),
    )
    if launch.kind == "pytest":
        device = "cuda" if profile.has_gpu else "cpu"
        return replace(base, junit=junit(launch.name, where, device))
    if launch.kind == "ceilings":
        files = {**base.files, "ceilings": (f"{where}/ceilings.json", digest_of(where))}
        return replace(base, files=files, ceilings=machine_files.document(launch, profile))
    if launch.stop is not None:
        return _stopped(launch, profile, **speed)
    table = frame(launch, profile, **speed)
    trained = float(table["dt_s"].sum())
    done = done.model_copy(update={"duration_s": trained + 8.0})
    over = machine_files.at(done.duration_s)
    samples = machine_files.gpu_samples(launch.nproc, trains_s=trained) if profile.has_gpu else None
    gpu = {"gpu": HEALTHY["on_gpu"]} if profile.has_gpu else {}
    counted = machine_files.devices(launch.nproc) if profile.has_gpu else machine_files.no_devices()
    if launch.nodes > 1:
        counted["nodes"] = [f"n{index}" for index in range(launch.nodes)]
    return replace(
        base,
        result=done,
        training=TrainingLog(frame=table, path=f"{where}/training.csv", sha256=digest_of(where)),
        gates=gates(launch.steps, after=launch.after),
        ranks=ranks(launch, profile, table),
        env=env(launch, profile),
        checkout=checkout(launch) if launch.commit else None,
        audit=audit() if launch.phase == "sdpa_audit" else None,
        profile={**HEALTHY["profile"], **gpu} if launch.phase == "nvtx" else None,
        gpu_samples=samples,
        devices_before=counted,
        devices_after={**counted, "taken_at": over},
        kernel_log={**HEALTHY["kernel_log"], "began_at": done.started_at, "ended_at": over},
        load=dict(HEALTHY["load"]),
    )


def _stopped(launch: Launch, profile: Profile, **speed: Any) -> LaunchEvidence:
    """A launch that was told to end: it does the steps of one that was not."""
    total = launch.steps - 200
    begin = launch.after or int(launch.config_overrides["train.keep_every"]) + 4
    end = min(begin + launch.stop.steps + 1, total)
    whole = launch.model_copy(update={"after": 0, "resumes": "", "stop": None})
    made = healthy(whole.model_copy(update={"steps": total}), profile, **speed)
    table = made.training.frame
    table = table[(table["step"] > begin) & (table["step"] <= end)].reset_index(drop=True)
    ran = whole.model_copy(update={"after": begin, "steps": end})
    logs = [
        replace(
            log,
            exit_code=launch.stop.code,
            checkpoints=(*log.checkpoints, {"path": f"checkpoints/step_{end}", "seconds": 1.0}),
        )
        for log in ranks(ran, profile, table)
    ]
    result = made.result.model_copy(
        update={
            "begun": Begun(path=f"{launch.resumes}/step_{begin}", step=begin, sha256=SHA),
            "stopped": Stopped(step=end - 1),
            "ranks": tuple(RankExit(rank=log.rank, code=log.exit_code) for log in logs),
        }
    )
    return replace(
        made,
        launch=launch,
        result=result,
        training=replace(made.training, frame=table),
        gates=gates(end, after=begin),
        ranks=tuple(logs),
        env={**env(launch, profile), "resumed": {"sha256": SHA, "step": begin}},
    )


# Evidence made by hand, written as the files that it would have been read from.


def write_launch(root: Path, made: LaunchEvidence) -> Path:
    """A run directory from which the same evidence is read; returns it."""
    folder = root / made.launch.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    own = zlib.crc32(made.launch.run_dir.encode()) % 1_000_000  # no two launches leave one file
    if made.training is not None:
        table = made.training.frame.assign(
            warmup=made.training.frame["warmup"].astype(int), launch=own
        )
        table.to_csv(folder / contract.TRAINING_CSV, index=False)
    if made.gates is not None:
        made.gates.to_csv(folder / contract.GATES_CSV, index=False)
    documents = {k: n for k, n in _FILES.items() if n.endswith(".json")}
    documents["ceilings"] = contract.CEILINGS_JSON
    for kind, name in documents.items():
        if (document := getattr(made, kind)) is not None:
            (folder / name).write_text(json.dumps(document))
    (folder / "result.json").write_text(made.result.model_dump_json())
    for rank in made.ranks:
        lines = [{**line, "ts": float(line["ts"]) + own} for line in records(rank)]
        write_beats(folder, rank.rank, lines)
    (folder / "console.log").write_text("".join(f"{line}\n" for line in made.console_lines))
    return folder
