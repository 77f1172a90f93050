"""Evidence made by hand: a healthy launch of any plan, and ways to spoil it.

Everything follows from the plan itself (steps, arms, toggles), so a healthy run of a profile is
what its trainer would have left, in numbers that are easy to reason about.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from nsa.toggles import TOGGLES
from runbook import registry
from runbook.config import Profile, load_profile
from runbook.records import Check, Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import (
    Effect,
    Fact,
    JUnitCase,
    JUnitReport,
    LaunchEvidence,
    PhaseEvidence,
    RankLog,
    TrainingLog,
)
from runbook.records.phase import Judgement, PlanContext

PHASES = registry.phases()

SHA = "5" * 64
TOKEN = "ab" * 16
VOCABULARY = 256
FLOOR = math.log(VOCABULARY)
ENTROPY = 1.1063

Change = Callable[[LaunchEvidence], LaunchEvidence]


_profile = functools.cache(load_profile)


def context(name: str = "a100x2_pcie4", **changes: Any) -> PlanContext:
    """A context on a shipped profile."""
    return PlanContext(profile=_profile(name), **changes)


def with_profile(base: PlanContext, **changes: Any) -> PlanContext:
    """The same context on a changed profile; a limit is given as `limits={name: value}`."""
    document: dict[str, Any] = base.profile.model_dump(mode="json")
    for name, value in changes.pop("limits", {}).items():
        document["limits"][name]["value"] = value
    document |= changes
    return replace(base, profile=Profile.model_validate(document))


def digest_of(text: str) -> str:
    """The digest of a file that only this launch has."""
    return hashlib.sha256(text.encode()).hexdigest()


def frame(
    launch: Launch, profile: Profile, *, rate: float = 1e5, rates: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """One row per step at exactly `rate` tok/s, or at the rate of each arm."""
    tokens = profile.workload.tokens_per_step
    rows: list[tuple[str, int, bool]] = []
    if launch.schedule is None:
        rows = [("", 0, False)] * launch.steps
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
            "step": np.arange(1, len(rows) + 1),
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


def jittered(log: TrainingLog, share: float, *, seed: int = 1) -> TrainingLog:
    """The same log with random step times; rates stay tokens / time."""
    changed = log.frame.copy()
    changed["dt_s"] *= np.random.default_rng(seed).normal(1.0, share, len(changed)).clip(0.5)
    changed["toks_per_s"] = changed["tokens"] / changed["dt_s"]
    return replace(log, frame=changed)


def env(launch: Launch, profile: Profile) -> dict[str, Any]:
    """The env.json of a launch that ran as planned."""
    work = profile.workload
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
        "git": {"branch": profile.branch, "sha": "1" * 40, "dirty": False, "diff_sha256": None},
        "versions": {"torch": "2.13.0", "cuda": "13.0" if cuda else None, "driver": "580"},
        "world_size": launch.nproc,
        "device": {
            "type": profile.hardware.device,
            "name": profile.hardware.gpu_name or "some processor",
            "count": launch.nproc,
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
            },
            "model": {"n_layers": 2},
            "nsa": {"l": 16},
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
            "n_params": 78_400_000,
            "vocab_size": VOCABULARY,
            "dtype": work.dtype,
            "device": profile.hardware.device,
            "dataset": "markov" if "markov" in launch.argv else "synthetic",
            "gradient_checkpointing": False,
            "model_flops_per_token": 5e8,
            "loss_floor": ENTROPY if "markov" in launch.argv else FLOOR,
        },
        "toggles": toggles,
        "notes": [],
        "arms": {"warmup_steps": launch.schedule.warmup_steps} if launch.schedule else None,
    }


def effects(launch: Launch, rank: int) -> tuple[Effect, ...]:
    """Every toggle proves itself, per arm where arms take turns."""
    found = [
        Effect(toggle=name, value=value, took_effect=True, evidence="seen", rank=rank)
        for name, value in launch.env.items()
        if name in TOGGLES
    ]
    arms = launch.schedule.settings if launch.schedule else {}
    found += [
        Effect(toggle=name, value=value, took_effect=True, evidence="seen", arm=arm, rank=rank)
        for arm, settings in arms.items()
        for name, value in settings.items()
    ]
    return tuple(found)


def buckets(launch: Launch) -> tuple[Mapping[str, Any], ...]:
    """DDP's sizes: a model of 150 MiB cut by the bucket of each arm."""
    if launch.schedule is not None:
        sizes = {
            arm: values["NSA_DDP_BUCKET_MB"]
            for arm, values in launch.schedule.settings.items()
            if "NSA_DDP_BUCKET_MB" in values
        }
    else:
        sizes = {"": launch.env.get("NSA_DDP_BUCKET_MB", "25")}
    return tuple(
        {"arm": arm, "block": 0, "sizes_mib": [float(size)] * math.ceil(150 / float(size))}
        for arm, size in sizes.items()
    )


GROUPS = ("embedding", "attention.q", "attention.gates", "mlp.down")
PROOF: Mapping[str, Any] = {
    "mean_low": 0.998,
    "mean_high": 1.0,
    "missing": [],
    "norm_told": 3.0,
    "norm_before": 3.0,
    "norm_after": 1.0,
    "own_gradient": dict.fromkeys(GROUPS, 1e-3),
}
SPOTS: Mapping[str, Any] = {
    "positions": [0, 9, 99],
    "embedding": 0.0,
    "attention": 1e-3,
    "layer": 1e-3,
    "logits": 1e-3,
    "layers": 2.0,
    "seams": 0.0,
    "blocks_illegal": 0.0,
    "blocks_shortfall": 0.0,
}


def beats(table: pd.DataFrame, rank: int, nproc: int) -> pd.DataFrame:
    """What a rank's heartbeats tell of the steps that are in the CSV: it reads 2 rows, or 1."""
    rows = range(2) if nproc == 1 else (rank,)
    return pd.DataFrame(
        {
            "step": table["step"],
            "mono": 1000.0 + table["dt_s"].cumsum(),
            "alone": True,
            "embedded": table["tokens"] / nproc,
            "data": [f"{sum(step * 64 + row for row in rows):016x}" for step in table["step"]],
            "mem_mib": table["mem_mib"],
            "rss_mib": table["mem_mib"],
            "cuda_mib": table["mem_mib"],
            "loss": table["loss"],
            "toks_per_s": table["toks_per_s"],
            "grad_norm": table["grad_norm"],
        }
    )


def proof(launch: Launch, profile: Profile, rank: int, table: pd.DataFrame) -> Mapping[str, Any]:
    """The first pass of a rank: a pass has the tokens of one micro-batch."""
    work = profile.workload
    wire = launch.env.get("NSA_DDP_COMPRESS", "off") if launch.nproc > 1 else "off"
    return {
        **PROOF,
        "loss": float(table["loss"].iloc[0]),
        "loss_again": float(table["loss"].iloc[0]),
        "positions": work.seq_len * work.global_batch // launch.nproc,
        "wire": "fp32" if wire == "off" else wire,
        "mean_low": 1.0 if wire == "off" else PROOF["mean_low"],
        "oracle": _spots(profile) if rank == 0 else None,
    }


def _spots(profile: Profile) -> Mapping[str, Any]:
    """What the profile's types explain: float32 is a thousand times closer."""
    close = 1e-3 if profile.workload.dtype == "fp32" else 1.0
    return {n: v * close if v == 1e-3 else v for n, v in SPOTS.items()}


def told(made: LaunchEvidence) -> LaunchEvidence:
    """The same launch whose ranks tell of the steps what its CSV tells."""
    assert made.training is not None
    table, nproc = made.training.frame, made.launch.nproc
    logs = tuple(replace(log, steps=beats(table, log.rank, nproc)) for log in made.ranks)
    return replace(made, ranks=logs)


def ranks(launch: Launch, profile: Profile, table: pd.DataFrame) -> tuple[RankLog, ...]:
    """Heartbeats of all ranks, to the last step, with equal parameters."""
    return tuple(
        RankLog(
            rank=rank,
            path=f"{launch.run_dir}/heartbeat_rank{rank}.jsonl",
            sha256=digest_of(f"{launch.run_dir} {rank}"),
            events=3 * launch.steps,
            tokens=frozenset({TOKEN}),
            first_step=1,
            last_step=launch.steps,
            exit_code=0,
            exit_reason="done",
            param_hash="feed",
            counts={"exit": 1},
            effects=effects(launch, rank),
            ddp_buckets=buckets(launch),
            pids=(100 + rank,),
            clock_s=float(table["dt_s"].sum()),
            proof=proof(launch, profile, rank, table),
            ending={
                "fetched_sum": 7,
                "embedded_sum": 7,
                "moved": dict.fromkeys(GROUPS, 4e-4),
                "largest_lr": 2e-4,
                "updates": [len(table), len(table)],
                "proof": proof(launch, profile, rank, table),
                "first_update": {"moved": 2e-4, "lr": 2e-4},
            },
            steps=beats(table, rank, launch.nproc),
        )
        for rank in range(launch.nproc)
    )


def gpu_samples(nproc: int, *, busy: float = 95.0, used_mib: float = 40_000.0) -> pd.DataFrame:
    """What nvidia-smi showed, once a second."""
    return pd.DataFrame(
        [
            (f"2026-01-01T00:00:{second:02d}", gpu, busy, used_mib, 81_920.0)
            for second in range(20)
            for gpu in range(nproc)
        ],
        columns=[
            "timestamp",
            "index",
            "utilization_percent",
            "memory_used_mib",
            "memory_total_mib",
        ],
    )


def gates(steps: int, *, entropy: float = 0.95, max_gate: float = 0.4) -> pd.DataFrame:
    """Gate health at every tenth step; the last digits of readings that were taken differ."""
    at = np.arange(10, max(steps, 50) + 1, 10)
    return pd.DataFrame({"step": at, "entropy": entropy + 1e-12 * at, "max_gate": max_gate})


_AUDIT = {"cmp": "explicit_softmax", "sel": "flash", "win": "flash"}
_NO_FLASH = {"cmp": "explicit_softmax", "sel": "efficient", "win": "efficient"}
_PROFILE = {
    "ranges": {"nsa.sel.ranges_v2": {"count": 120, "cpu_us": 900.0, "cuda_us": 700.0}},
    "python_share": 0.12,
    "top_python": [{"name": "loop.py:10:step", "share": 0.03}],
    "steps": 10,
    "wall_us": 1e6,
}


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
    ),
    "parity": (
        ("nsa.tests.test_selection_v2_equiv", "test_equivalence_various_patterns[random]"),
        ("nsa.tests.test_selection_v2_equiv", "test_equivalence_various_patterns[gaps]"),
    ),
    "speed": (("nsa.tests.test_performance_guards", "test_v2_performance_improvement[2048]"),),
}


def junit(name: str, run_dir: str) -> JUnitReport:
    """All of a test launch's tests passed."""
    cases = tuple(
        JUnitCase(name=test, classname=module, status="passed") for module, test in _TESTS[name]
    )
    return JUnitReport(path=f"{run_dir}/junit.xml", sha256=SHA, cases=cases)


def healthy(launch: Launch, profile: Profile, **speed: Any) -> LaunchEvidence:
    """A launch that ran well; `rate` and `rates` as in `frame`."""
    where = launch.run_dir
    done = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token=TOKEN)
    base = LaunchEvidence(
        launch=launch,
        result=done,
        console_path=f"{where}/console.log",
        console_sha256=SHA,
        console_lines=("[ddp] gradient compression enabled: bf16",),
    )
    if launch.kind == "pytest":
        return replace(base, junit=junit(launch.name, where))
    table = frame(launch, profile, **speed)
    done = done.model_copy(update={"duration_s": float(table["dt_s"].sum()) + 8.0})
    samples = gpu_samples(launch.nproc) if profile.has_gpu else None
    return replace(
        base,
        result=done,
        training=TrainingLog(frame=table, path=f"{where}/training.csv", sha256=digest_of(where)),
        gates=gates(launch.steps),
        gates_path=f"{where}/gates.csv",
        gates_sha256=SHA,
        ranks=ranks(launch, profile, table),
        env=env(launch, profile),
        env_path=f"{where}/env.json",
        env_sha256=SHA,
        audit=audit() if launch.phase == "sdpa_audit" else None,
        audit_path=f"{where}/sdpa_audit.json",
        audit_sha256=SHA,
        profile=_PROFILE if launch.phase == "nvtx" else None,
        profile_path=f"{where}/profile_rank0.json",
        profile_sha256=SHA,
        trace_path=f"{where}/trace_rank0.json.gz",
        trace_sha256=SHA,
        gpu_samples=samples,
        gpu_samples_path=f"{where}/gpu_samples.csv",
        gpu_samples_sha256=SHA,
    )


_FACTS: dict[str, tuple[Any, str]] = {
    "git.branch": ("main", "host.json"),
    "git.sha": ("1" * 40, "git_sha.txt"),
    "git.dirty": (False, "git_status.txt"),
    "trainer.imports": (True, "host.json"),
    "torch.version": ("2.13.0", "collect_env.txt"),
    "torch.cuda_available": (True, "collect_env.txt"),
    "gpu.count": (2.0, "nvidia_smi.xml"),
    "gpu.names": ("NVIDIA A100 80GB PCIe, NVIDIA A100 80GB PCIe", "nvidia_smi.xml"),
    "gpu.driver": ("580.1", "nvidia_smi.xml"),
    "gpu.pcie_gen_max": (4.0, "nvidia_smi.xml"),
    "gpu.pcie_width": (16.0, "nvidia_smi.xml"),
    "gpu.memory_total_mib": (81_920.0, "nvidia_smi.xml"),
    "gpu.memory_used_mib": (10.0, "nvidia_smi.xml"),
    "gpu.processes": (0.0, "nvidia_smi.xml"),
    "gpu.nvlink": (False, "nvidia_topo.txt"),
    "infiniband.present": (False, "host.json"),
    "disk.free_gib": (500.0, "host.json"),
    "disk.write_mib_s": (900.0, "host.json"),
    "port.free": (True, "host.json"),
    "processes.leftover": (0.0, "host.json"),
    "env.problems": ("", "host.json"),
}


def facts(**changes: Any) -> dict[str, Fact]:
    """The machine of the profile; `gpu_count=1.0` changes the fact gpu.count."""
    renamed = {key.replace("_", ".", 1): value for key, value in changes.items()}
    unknown = set(renamed) - set(_FACTS)
    assert not unknown, unknown
    return {
        name: Fact(name=name, value=renamed.get(name, value), path=path, sha256=SHA, note="as seen")
        for name, (value, path) in _FACTS.items()
    }


H200_FACTS = {"gpu_count": 1.0, "gpu_names": "NVIDIA H200", "gpu_memory_total_mib": 143_771.0}


def evidence(
    phase: str,
    where: PlanContext,
    *,
    change: Change | None = None,
    only: Sequence[str] | None = None,
    earlier: Mapping[str, PhaseEvidence] | None = None,
    **speed: Any,
) -> PhaseEvidence:
    """Healthy launches of a phase's plan; `change` spoils those named in `only` (all if None)."""
    found: dict[str, LaunchEvidence] = {}
    for launch in PHASES[phase].plan(where):
        made = healthy(launch, where.profile, **speed)
        if change is not None and (only is None or launch.name in only):
            made = _changed(made, change)
        found[launch.name] = made
    machine = H200_FACTS if where.profile.name == "h200x1" else {}
    return PhaseEvidence(
        launches=found,
        facts=facts(**machine) if phase == "preflight" else {},
        earlier=earlier or {},
    )


def _changed(made: LaunchEvidence, change: Change) -> LaunchEvidence:
    """Changed; the heartbeats follow a changed CSV, unless they are what was changed."""
    after = change(made)
    moved = after.training is not None and after.training is not made.training
    return told(after) if moved and after.ranks is made.ranks else after


def judge(phase: str, found: PhaseEvidence, where: PlanContext) -> Judgement:
    """The phase's judgement; its checks must be the declared ones."""
    judgement = PHASES[phase].judge(found, where)
    assert tuple(check.id for check in judgement.checks) == PHASES[phase].check_ids(where)
    return judgement


def row(phase: str, what: str, found: PhaseEvidence, where: PlanContext) -> Check:
    """One check of a phase."""
    checks = {check.id: check for check in judge(phase, found, where).checks}
    return checks[f"{phase}.{what}"]


def ended(status: LaunchStatus, *, rows: int | None = None, cause: str = "made up") -> Change:
    """The launch ended badly, after `rows` rows."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        result = made.result.model_copy(
            update={
                "status": status,
                "cause": cause,
                "culprit_rank": 1,
                "evidence": ("stacks.txt",),
            }
        )
        log = made.training
        if rows is not None and log is not None:
            log = replace(log, frame=log.frame.iloc[:rows])
        return replace(made, result=result, training=log)

    return change


def columns(**values: Any) -> Change:
    """Columns of training.csv replaced; a callable gets the frame."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        assert made.training is not None
        table = made.training.frame.copy()
        for name, value in values.items():
            table[name] = value(table) if callable(value) else value
        return replace(made, training=replace(made.training, frame=table))

    return change


def effective(**values: Any) -> Change:
    """Entries of env.json's effective block replaced."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        found = dict(made.env or {})
        found["effective"] = {**found["effective"], **values}
        return replace(made, env=found)

    return change


def without_effect(toggle: str, *, took: bool | None = False, arm: str | None = None) -> Change:
    """The trainer's report on a toggle says no (`took` False), nothing (None), or is absent."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        logs = tuple(
            replace(
                log,
                effects=tuple(
                    replace(effect, took_effect=took)
                    if effect.toggle == toggle and (arm is None or effect.arm == arm)
                    else effect
                    for effect in log.effects
                ),
            )
            for log in made.ranks
        )
        return replace(made, ranks=logs)

    return change


def every_rank(**values: Any) -> Change:
    """Fields of all heartbeat logs replaced."""
    return lambda made: replace(made, ranks=tuple(replace(log, **values) for log in made.ranks))


def rank(number: int, **values: Any) -> Change:
    """Fields of one rank's heartbeat log replaced."""
    return lambda made: replace(
        made,
        ranks=tuple(replace(log, **values) if log.rank == number else log for log in made.ranks),
    )


def parts(**values: Any) -> Change:
    """Fields of the launch's evidence replaced."""
    return lambda made: replace(made, **values)
