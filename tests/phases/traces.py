"""What a healthy trainer leaves: every file of a launch, made by hand.

Everything follows from the plan itself (steps, arms, toggles), so a healthy run of a profile is
what its trainer would have left, in numbers that are easy to reason about.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from nsa.toggles import TOGGLES
from runbook.config.profile import Profile, Workload
from runbook.files import utc_text
from runbook.folder.launch.shapes import DEVICE_COUNTERS
from runbook.records import Begun, Launch, LaunchResult, LaunchStatus, RankExit, Stopped
from runbook.records.evidence import (
    JUnitCase,
    JUnitReport,
    LaunchEvidence,
    TrainingLog,
)
from runbook.records.launch import option
from tests.phases import ceiling_files
from tests.phases.heartbeats import (
    BEGAN_AT,
    MODEL,
    NSA,
    SEED,
    SHA,
    TOKEN,
    VOCABULARY,
    digest_of,
    ranks,
)

DRIVER, NCCL = "580.95.05", "2.27.7"
# The first step begins so many seconds after the launch.
_BOOT_S = 6.0
STARTED_AT = utc_text(datetime.fromtimestamp(BEGAN_AT - _BOOT_S, tz=UTC))
FLOOR = math.log(VOCABULARY)
ENTROPY = 1.1063


def frame(
    launch: Launch, profile: Profile, *, rate: float = 1e5, rates: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """One row per step at exactly `rate` tok/s, or at the rate of each arm."""
    tokens = profile.workload_of(launch.phase).tokens_per_step
    rows: list[tuple[str, int, bool]] = []
    if launch.schedule is None:
        rows = [("", 0, False)] * (launch.steps - launch.after)
    else:
        plan = launch.schedule
        for block, order in enumerate(plan.rounds):
            for arm in order:
                rows += [(arm, block, True)] * plan.warmup_steps + [
                    (arm, block, False)
                ] * plan.steps
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
            "host_s": 0.0001,
        }
    )


def _learned(steps: int) -> Any:
    """From knowing nothing most of the way to the entropy rate, in a tenth of the steps."""
    share = np.minimum(1.0, np.arange(steps) / max(1, steps // 10))
    return FLOOR - 0.9 * share * (FLOOR - ENTROPY)


def env(launch: Launch, profile: Profile) -> dict[str, Any]:
    """The env.json of a launch that ran as planned."""
    work = profile.workload_of(launch.phase)
    toggles = [
        {
            "name": name,
            "value": TOGGLES[name].parse(value),
            "default": None,
            "source": "environment",
        }
        for name, value in launch.env.items()
        if name in TOGGLES
    ]
    cuda = profile.has_gpu
    return {
        "schema_version": 1,
        "run_token": TOKEN,
        "argv": list(launch.argv),
        "git": {
            "branch": profile.branch,
            "sha": launch.commit or "1" * 40,
            "dirty": False,
            "diff_sha256": None,
        },
        "package": package(launch),
        "versions": {
            "torch": "2.13.0",
            "cuda": "13.0" if cuda else None,
            "driver": DRIVER,
            "nccl": NCCL if cuda else None,
        },
        "world_size": launch.nproc,
        "nodes": launch.nodes,
        "device": {
            "type": profile.hardware.device,
            "name": profile.hardware.gpu_name or "some processor",
            "count": launch.nproc,
            "uuids": [f"GPU-{gpu}" for gpu in range(launch.nproc)] if cuda else None,
        },
        "config": {
            "train": {
                "seq_len": work.seq_len,
                "steps": launch.steps,
                "out_dir": "x",
                "lr": 2e-4,
                "warmup_steps": 0,
                "lr_schedule": "constant",
                "grad_clip": 1.0,
                "seed": SEED,
                **{
                    key.removeprefix("train."): value
                    for key, value in launch.config_overrides.items()
                    if key.startswith(("train.keep_", "train.save_"))
                },
            },
            "model": dict(MODEL),
            "nsa": dict(NSA),
        },
        "config_sha256": "c" * 64,
        "effective": {
            "seq_len": work.seq_len,
            "global_batch": work.global_batch,
            "per_rank_batch": work.global_batch // launch.nproc,
            "accumulation": work.accumulation,
            "tokens_per_step": work.tokens_per_step,
            "steps": launch.steps,
            "schedule_steps": launch.steps,
            "n_params": 78_404_784,
            "vocab_size": VOCABULARY,
            "dtype": work.dtype,
            "device": profile.hardware.device,
            "dataset": option(launch.argv, "--dataset") or "synthetic",
            "gradient_checkpointing": False,
            "model_flops_per_token": 5e8,
            "loss_floor": ENTROPY if "markov" in launch.argv else FLOOR,
        },
        "attention": attention(work) if cuda else {},
        "toggles": toggles,
        "notes": [],
        "arms": json.loads(launch.schedule.to_trainer_json()) if launch.schedule else None,
    }


def attention(work: Workload, *paths: str) -> dict[str, Any]:
    """How a GPU runs attention; the self-test agrees with the named paths, varlen if none."""
    agrees = {"agrees": True, "refused": None, "problems": []}
    tested = {name: dict(agrees) for name in paths or ("varlen",)}
    return {
        "window": {"value": next(iter(tested)), "reason": "auto"},
        "self_test": {
            "ran": True,
            "reason": "device cuda",
            "seq_len": work.seq_len,
            "dtype": {"bf16": "bfloat16", "fp32": "float32"}[work.dtype],
            "paths": tested,
        },
    }


def gpu_samples(
    gpus: int,
    *,
    busy: float = 95.0,
    used_mib: float = 40_000.0,
    trains_s: float = 8.192,
) -> pd.DataFrame:
    """What NVML showed, five times a second: a start of 11 s, training, an end of 1 s.

    Of a long training every thousandth part is shown.
    """
    every_s = max(0.2, trains_s / 1000)
    at = np.arange(-11.0, trains_s + 1.0, every_s)
    stamps = pd.to_datetime(BEGAN_AT + at, unit="s")
    text = [stamp[:-3] for stamp in stamps.strftime("%Y/%m/%d %H:%M:%S.%f")]
    training = (at > 0.0) & (at <= trains_s + 0.5)
    frame = pd.DataFrame(
        {
            "timestamp": np.repeat(text, gpus),
            "index": np.tile(np.arange(gpus), len(at)),
            "utilization_percent": np.repeat(np.where(training, busy, 2.0), gpus),
            "memory_used_mib": used_mib,
            "memory_total_mib": 81_920.0,
        }
    )
    return frame.assign(
        throttle_reasons="0x0000000000000004",
        sm_clock_mhz=np.repeat(np.where(training, 1290.0, 210.0), gpus),
        pcie_gen=4.0,
        pcie_width=16.0,
        uuid="GPU-" + frame["index"].astype(str),
        source="nvml",
        own_processes=1.0,
        own_utilization_percent=busy,
        own_memory_mib=used_mib,
        other_processes=0.0,
        unknown_processes=0.0,
        others="",
    )


def slot(gpu: int) -> str:
    """The PCI place of a GPU."""
    return f"0000:{0x17 + gpu:02x}:00"


def devices(gpus: int) -> dict[str, Any]:
    """What healthy GPUs count, before a launch and after it."""
    counters = {**dict.fromkeys(DEVICE_COUNTERS, 0), "ecc_uncorrected_aggregate": 7}
    counters |= dict.fromkeys(("retired_single_bit", "retired_double_bit", "retired_pending"))
    found = [
        {
            "index": gpu,
            "uuid": f"GPU-{gpu}",
            "name": "NVIDIA A100 80GB PCIe",
            "pci": f"0000{slot(gpu)}.0".upper(),
            "pci_path": [f"0000:{0x56 + gpu:02x}:01"],
            "mig": False,
            "counters": dict(counters),
            "link": {"gen": 1, "gen_max": 4, "width": 16, "width_max": 16},
            "power": {"limit_w": 300.0, "default_w": 300.0},
            "sm_max_mhz": 1410,
            "clock_events": 1,
            "missing": {"retired_pending": "Not Supported"},
        }
        for gpu in range(gpus)
    ]
    return {
        "schema_version": 1,
        "source": "nvml",
        "problem": "",
        "driver": DRIVER,
        "taken_at": STARTED_AT,
        "gpus": found,
    }


def kernel_log(*lines: str, **changes: Any) -> dict[str, Any]:
    """What the kernel logged while a launch ran."""
    document = {"schema_version": 1, "source": "/dev/kmsg", "problem": "", "lost": False}
    document |= {"began_at": STARTED_AT, "ended_at": STARTED_AT}
    return {**document, "others": 3, "left_out": 0, "lines": list(lines), **changes}


def no_devices() -> dict[str, Any]:
    """What is written where there is no driver."""
    return {**devices(0), "source": "", "problem": "no NVIDIA driver; no nvidia-smi"}


def load(*, others_s: float = 1.0, steal_s: float = 0.0) -> dict[str, Any]:
    """A minute on two CPUs, in which others worked for so long."""
    return {
        "schema_version": 1,
        "problem": "",
        "cpus": 2,
        "wall_s": 60.0,
        "total_s": 120.0,
        "busy_s": 100.0 + others_s,
        "own_s": 100.0,
        "others_s": others_s,
        "steal_s": steal_s,
        "load_before": [0.5, 0.4, 0.3],
        "load_after": [2.1, 1.0, 0.5],
    }


def gates(
    steps: int, *, after: int = 0, entropy: float = 0.95, max_gate: float = 0.4
) -> pd.DataFrame:
    """Gate health at the first and every tenth step; the last digits of readings differ."""
    at = np.arange(after, after + max(steps - after, 50) + 1, 10)
    at[0] += 1
    entropies, largest = entropy + 1e-12 * at, np.full(len(at), max_gate)
    means = {"entropy_mean": entropies, "max_gate_mean": largest}  # all layers are alike
    return pd.DataFrame({"step": at, "entropy": entropies, "max_gate": largest, **means})


_AUDIT = {"cmp": "explicit_softmax", "sel": "flash", "win": "flash"}
_NO_FLASH = {"cmp": "explicit_softmax", "sel": "efficient", "win": "efficient"}
PROFILE = {
    "ranges": {"nsa.sel.ranges_v2": {"count": 120, "cpu_us": 900.0, "cuda_us": 700.0}},
    "python_share": 0.12,
    "top_python": [{"name": "loop.py:10:step", "share": 0.03}],
    "steps": 10,
    "wall_us": 1e6,
}
# A step takes 82 ms without the profiler and 100 ms with it; the kernels take 70 ms either way.
_ON_GPU = {"window_us": 1e6, "busy_us": 7e5, "idle_us": 3e5, "python_wait_us": 1.2e5}


def audit(kernels: Mapping[str, str] = _AUDIT) -> dict[str, Any]:
    """An audit in which the default arm ran `kernels`."""
    arms = {"default": kernels, "flash_only": _AUDIT, "no_flash": _NO_FLASH}
    return {
        "arms": {
            arm: {
                "branches": {branch: {"kernel": name, "ops": {}} for branch, name in found.items()}
            }
            for arm, found in arms.items()
        }
    }


_TESTS = {
    "sanity": (
        ("nsa.tests.test_equiv_small", "test_paths_agree"),
        ("nsa.tests.test_group_consistency", "test_heads_read_the_same_blocks"),
        ("nsa.tests.test_whole_model", "test_logits"),
        ("nsa.tests.test_documents", "test_training_reads_its_documents_in_order_and_again"),
        ("nsa.tests.test_safeguards", "test_training_stops_at_a_number_that_is_not_finite"),
    ),
    "parity": (
        ("nsa.tests.test_selection_v2_equiv", "test_equivalence_various_patterns[random]"),
        ("nsa.tests.test_selection_v2_equiv", "test_equivalence_various_patterns[gaps]"),
    ),
    "speed": (("nsa.tests.test_performance_guards", "test_v2_performance_improvement[2048]"),),
}


def junit(name: str, run_dir: str, device: str) -> JUnitReport:
    """All of a test launch's tests passed."""
    cases = tuple(
        JUnitCase(name=test, classname=module, status="passed", properties={"device": device})
        for module, test in _TESTS[name]
    )
    return JUnitReport(path=f"{run_dir}/junit.xml", sha256=SHA, cases=cases)


def package(launch: Launch) -> dict[str, str]:
    """The package that ran, which differs from commit to commit."""
    return {"path": f"/checkouts/{launch.commit[:12]}/nsa", "sha256": digest_of(launch.commit)}


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


def healthy(launch: Launch, profile: Profile, **speed: Any) -> LaunchEvidence:
    """A launch that ran well; `rate` and `rates` as in `frame`."""
    where = launch.run_dir
    done = LaunchResult(
        status=LaunchStatus.COMPLETED, exit_code=0, run_token=TOKEN, started_at=STARTED_AT
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
        return replace(base, files=files, ceilings=ceiling_files.document(launch, profile))
    if launch.stop is not None:
        return _stopped(launch, profile, **speed)
    table = frame(launch, profile, **speed)
    done = done.model_copy(update={"duration_s": float(table["dt_s"].sum()) + 8.0})
    over = utc_text(datetime.fromtimestamp(BEGAN_AT - _BOOT_S + done.duration_s, tz=UTC))
    trained = float(table["dt_s"].sum())
    samples = gpu_samples(launch.nproc, trains_s=trained) if profile.has_gpu else None
    gpu = {"gpu": _ON_GPU} if profile.has_gpu else {}
    counted = devices(launch.nproc) if profile.has_gpu else no_devices()
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
        profile={**PROFILE, **gpu} if launch.phase == "nvtx" else None,
        gpu_samples=samples,
        devices_before=counted,
        devices_after={**counted, "taken_at": over},
        kernel_log=kernel_log(ended_at=over),
        load=load(),
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
