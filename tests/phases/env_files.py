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
from tests.phases.machine_files import DRIVER

NCCL = "2.27.7"
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
        "config_sha256": "c" * 64,
        "effective": {
            **HEALTHY["effective"],
            **shape,
            "global_batch": work.global_batch,
            "per_rank_batch": work.global_batch // launch.nproc,
            "accumulation": work.accumulation,
            "tokens_per_step": work.tokens_per_step,
            "schedule_steps": launch.steps,
            "vocab_size": VOCABULARY,
            "dtype": work.dtype,
            "device": device,
            "dataset": option(launch.argv, "--dataset") or "synthetic",
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


def package(launch: Launch) -> dict[str, str]:
    """The package that ran, which differs from commit to commit."""
    return {"path": f"/checkouts/{launch.commit[:12]}/nsa", "sha256": digest_of(launch.commit)}
