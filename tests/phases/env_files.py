"""What a healthy trainer says of itself, by hand: env.json of a launch that ran as planned."""

from __future__ import annotations

import json
import math
from typing import Any

from nsa.toggles import TOGGLES
from runbook.config.profile import Profile, Workload
from runbook.records import Launch
from runbook.records.launch import option
from tests.phases.heartbeats import HEALTHY, MODEL, NSA, TOKEN, VOCABULARY, digest_of

_PATH = ("varlen",)
FLOOR = math.log(VOCABULARY)
ENTROPY = 1.1063


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
    tested = {name: {"agrees": True, "refused": None, "problems": []} for name in paths or _PATH}
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[work.dtype]
    of_it = {"seq_len": work.seq_len, "dtype": dtype, "paths": tested}
    return {
        "window": {"value": next(iter(tested)), "reason": "auto"},
        "self_test": {"ran": True, "reason": "device cuda", **of_it},
    }


def package(launch: Launch) -> dict[str, str]:
    """The package that ran, which differs from commit to commit."""
    return {"path": f"/checkouts/{launch.commit[:12]}/nsa", "sha256": digest_of(launch.commit)}
