"""What a healthy trainer says of itself: env.json, and effects, proofs and steps of its ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from nsa.contract.digests import recomputed_steps
from nsa.toggles import TOGGLES
from runbook.accounts import KINDS, GeneratedData
from runbook.config import Profile, Workload
from runbook.records import Launch
from runbook.records.evidence import Effect, LaunchEvidence, RankLog
from runbook.records.launch import option
from tests.accounts.first_weights import first_weights
from tests.factory.ranks import honest
from tests.factory.told import ORACLE, TEXT, first_pass, in_force, recomputed, told_steps

SHA = "5" * 64
TOKEN = "ab" * 16
HEALTHY: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("healthy.yaml").read_text())
MODEL, NSA, SEED = HEALTHY["model"], HEALTHY["nsa"], HEALTHY["train"]["seed"]
VOCABULARY, LAYERS = 256, 12
# Of the loss: of tokens that cannot be told in advance, and of a Markov chain.
FLOOR, ENTROPY = math.log(VOCABULARY), 1.1063
# 2026-01-01 00:00:00 UTC: the first step begins.
BEGAN_AT = 1_767_225_600.0


def digest_of(text: str) -> str:
    """The digest of a file that only this launch has."""
    return hashlib.sha256(text.encode()).hexdigest()


def effects(launch: Launch, rank: int) -> tuple[Effect, ...]:
    """Every toggle proves itself, per arm where arms take turns."""
    own = {name: value for name, value in launch.env.items() if name in TOGGLES}
    arms = launch.schedule.settings if launch.schedule else {}
    return tuple(
        Effect(toggle=name, value=value, took_effect=True, evidence="seen", arm=arm, rank=rank)
        for arm, settings in [("", own), *arms.items()]
        for name, value in settings.items()
    )


def buckets(launch: Launch) -> tuple[Mapping[str, Any], ...]:
    """DDP's sizes: a model of 150 MiB cut by the bucket of each arm."""
    alone = {"": {"NSA_DDP_BUCKET_MB": "25", **launch.env}}
    arms = launch.schedule.settings if launch.schedule else alone
    return tuple(
        {"arm": arm, "block": 0, **cut_by(float(values["NSA_DDP_BUCKET_MB"]), 150.0)}
        for arm, values in arms.items()
        if "NSA_DDP_BUCKET_MB" in values
    )


def cut_by(cap_mib: float, of_mib: float) -> dict[str, Any]:
    """The buckets of a model of so many MiB whose parameters have half of the cap each."""
    sizes = [cap_mib] * math.ceil(of_mib / cap_mib)
    whole = [round(size * 2**20) for size in sizes]
    return {"sizes_mib": sizes, "bytes": whole, "last_bytes": [size // 2 for size in whole]}


GROUPS = ("embedding", "attention.q", "attention.gates", "mlp.down")
WEIGHTS: Mapping[str, Any] = first_weights(
    {"config": {"model": MODEL, "nsa": NSA}, "effective": {"vocab_size": VOCABULARY}}
)
SPOTS: Mapping[str, Any] = {
    **ORACLE,
    **dict.fromkeys(("attention", "layer", "logits"), 1e-3),
    "positions": [0, 9, 99],
    "shape": {**MODEL, **NSA},
    "layers": float(LAYERS),
    "gates": 1e-7,
}


def data_of(launch: Launch, profile: Profile) -> GeneratedData | None:
    """The data of a launch, where they are generated."""
    dataset = option(launch.argv, "--dataset") or "synthetic"
    work = profile.workload_of(launch.phase)
    if dataset not in KINDS:
        return None
    return GeneratedData(
        kind=dataset,
        seed=SEED,
        vocab_size=VOCABULARY,
        seq_len=work.seq_len,
        nproc=launch.nproc,
        rows=work.global_batch // launch.nproc,
        accumulation=work.accumulation,
    )


def digests(data: GeneratedData | None, rank: int, nproc: int, steps: Sequence[int]) -> list[str]:
    """Of what a rank reads in each step: of documents it reads 2 rows, or 1."""
    if data is not None:
        return [data.of_step(rank, step) for step in steps]
    rows = range(2) if nproc == 1 else (rank,)
    return [f"{sum(step * 64 + row for row in rows):016x}" for step in steps]


def beats(
    table: pd.DataFrame, rank: int, nproc: int, data: GeneratedData | None = None
) -> pd.DataFrame:
    """What a rank's heartbeats tell of the steps that are in the CSV."""
    passed = table["dt_s"].cumsum()
    memory = dict.fromkeys(("mem_mib", "rss_mib", "cuda_mib"), table["mem_mib"])
    return told_steps(
        table,
        began=1000.0 + 1e-5 * rank,
        data=digests(data, rank, nproc, table["step"].tolist()),
        ts=BEGAN_AT + passed,
        embedded=table["tokens"] / nproc,
        **memory,
        reserved_mib=table["mem_mib"] * 1.1,
        cpu_s=5.0 + 0.9 * passed,
    )


def proof(launch: Launch, profile: Profile, rank: int, table: pd.DataFrame) -> Mapping[str, Any]:
    """The first pass of a rank: a pass has the tokens of one micro-batch."""
    work = profile.workload_of(launch.phase)
    wire = launch.env.get("NSA_DDP_COMPRESS", "off")
    return first_pass(
        float(table["loss"].iloc[0]),
        positions=work.seq_len * work.global_batch // launch.nproc,
        own_gradient=dict.fromkeys(GROUPS, 1e-3),
        wire="fp32" if wire == "off" else wire,
        oracle=_spots(profile),
        weights=None if launch.after else WEIGHTS,
        text=None if data_of(launch, profile) else TEXT,
    )


def _spots(profile: Profile) -> Mapping[str, Any]:
    """What the profile's types explain: float32 is a thousand times closer."""
    close = 1e-3 if profile.workload.dtype == "fp32" else 1.0
    return {n: v * close if v == 1e-3 else v for n, v in SPOTS.items()}


def told(made: LaunchEvidence) -> LaunchEvidence:
    """The same launch whose ranks tell of the steps what its CSV tells."""
    table, nproc = made.training.frame, made.launch.nproc
    data = GeneratedData.of(made.env or {})
    logs = tuple(
        replace(
            log,
            steps=beats(table, log.rank, nproc, data),
            ending={**log.ending, "recomputed": again(made.launch, table)},
        )
        for log in made.ranks
    )
    return replace(made, ranks=logs)


def again(launch: Launch, table: pd.DataFrame) -> dict[str, Any]:
    """Loss and gradient of the steps that are computed twice."""
    profiled = "--profile-steps" in launch.argv
    steps = recomputed_steps(TOKEN, launch.after + 1, launch.steps, profiled=profiled)
    return recomputed(steps, table, layers=LAYERS)


def _saved(launch: Launch) -> tuple[Mapping[str, Any], ...]:
    """The checkpoints that the plan asks for, each written in a second."""
    every = int(launch.config_overrides.get("train.save_every", 0))
    steps = [*range(every, launch.steps, every)] if every else []
    steps = [step for step in steps if step > launch.after]
    steps += [launch.steps] if "--save" in launch.argv else []
    return tuple({"path": f"checkpoints/step_{step}", "seconds": 1.0} for step in steps)


def _read_back(launch: Launch, accumulation: int) -> Mapping[str, Any] | None:
    """The newest of these checkpoints, read back as it was written, and those that were kept."""
    if not (saved := _saved(launch)):
        return None
    kept = [int(str(one["path"]).rpartition("_")[2]) for one in saved]
    step, regular = kept[-1], int(launch.config_overrides.get("train.keep_every", 0))
    last = kept[-int(launch.config_overrides.get("train.keep_last", 0)) :]
    kept = [one for one in kept if one in last or (regular and one % regular == 0)]
    positions = [{"step": step * accumulation}] * launch.nproc
    told = {"step": step, "read": len(saved), "kept": kept, "positions": positions}
    return HEALTHY["read_back"] | told


def ranks(launch: Launch, profile: Profile, table: pd.DataFrame) -> tuple[RankLog, ...]:
    """Heartbeats of all ranks, to the last step, with equal parameters."""
    accumulation = profile.workload_of(launch.phase).accumulation
    data = data_of(launch, profile)
    return tuple(
        honest(
            rank,
            table,
            beats(table, rank, launch.nproc, data),
            token=TOKEN,
            proof=proof(launch, profile, rank, table),
            moved=dict.fromkeys(GROUPS, min(4e-4, 2e-4 * len(table))),
            rate=2e-4,
            twice=again(launch, table),
            ending={
                "saved": _read_back(launch, accumulation) if rank == 0 else None,
                "in_force": in_force(launch.nproc, launch.env),
            },
            path=f"{launch.run_dir}/heartbeat_rank{rank}.jsonl",
            sha256=digest_of(f"{launch.run_dir} {rank}"),
            checkpoints=_saved(launch),
            effects=effects(launch, rank),
            ddp_buckets=buckets(launch),
        )
        for rank in range(launch.nproc)
    )


def env(launch: Launch, profile: Profile) -> dict[str, Any]:
    """The env.json of a launch that ran as planned."""
    work = profile.workload_of(launch.phase)
    set_there = {"default": None, "source": "environment"}
    toggles = [
        {"name": name, "value": TOGGLES[name].parse(value), **set_there}
        for name, value in launch.env.items()
        if name in TOGGLES
    ]
    cuda, device = profile.has_gpu, profile.hardware.device
    train = {
        key.removeprefix("train."): value
        for key, value in launch.config_overrides.items()
        if key.startswith(("train.keep_", "train.save_"))
    }
    shape = {"seq_len": work.seq_len, "steps": launch.steps}
    return {
        **HEALTHY["env"],
        "run_token": TOKEN,
        "argv": list(launch.argv),
        "git": {
            **HEALTHY["env"]["git"],
            "branch": profile.branch,
            "sha": launch.commit or "1" * 40,
        },
        "package": package(launch),
        "versions": HEALTHY["env"]["versions"] | ({} if cuda else {"cuda": None, "nccl": None}),
        "world_size": launch.nproc,
        "nodes": launch.nodes,
        "device": {
            "type": device,
            "name": profile.hardware.gpu_name or "some processor",
            "count": launch.nproc,
            "uuids": [f"GPU-{gpu}" for gpu in range(launch.nproc)] if cuda else None,
        },
        "config": {
            "train": {**HEALTHY["train"], **shape, **train},
            "model": dict(MODEL),
            "nsa": dict(NSA),
        },
        "effective": {
            **HEALTHY["effective"],
            **shape,
            "global_batch": work.global_batch,
            "per_rank_batch": work.global_batch // launch.nproc,
            "accumulation": work.accumulation,
            "tokens_per_step": work.tokens_per_step,
            "schedule_steps": launch.steps,
            "dtype": work.dtype,
            "device": device,
            "dataset": option(launch.argv, "--dataset") or "synthetic",
            "loss_floor": ENTROPY if "markov" in launch.argv else FLOOR,
        },
        "attention": attention(work) if cuda else {},
        "toggles": toggles,
        "arms": json.loads(launch.schedule.to_trainer_json()) if launch.schedule else None,
    }


def attention(work: Workload, *paths: str) -> dict[str, Any]:
    """How a GPU runs attention; the self-test agrees with the named paths, varlen if none."""
    tested = {
        name: {"agrees": True, "refused": None, "problems": []} for name in paths or ("varlen",)
    }
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[work.dtype]
    of_it = {"seq_len": work.seq_len, "dtype": dtype, "paths": tested}
    return {
        "window": {"value": next(iter(tested)), "reason": "auto"},
        "self_test": {"ran": True, "reason": "device cuda", **of_it},
    }


def package(launch: Launch) -> dict[str, str]:
    """The package that ran, which differs from commit to commit."""
    return {"path": f"/checkouts/{launch.commit[:12]}/nsa", "sha256": digest_of(launch.commit)}
