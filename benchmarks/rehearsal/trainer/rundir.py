"""What the trainer and the tests write of their own: tables, env.json, audit, profile, JUnit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import torch

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.roofline import HOST_S
from benchmarks.rehearsal.trainer.beats import Rank
from benchmarks.rehearsal.trainer.job import Job
from benchmarks.rehearsal.trainer.steps import PROFILED_HOST, Steps, floor_of
from nsa.contract import (
    GATES_COLUMNS,
    GATES_CSV,
    PROFILE_JSON,
    TRACE_FILE,
    VAL_COLUMNS,
    VAL_CSV,
    names,
)
from nsa.launch.envfile import effective
from runbook.config.load import load_profile
from runbook.records import Launch
from tests.factory import files
from tests.factory.told import GATES
from tests.phases import traces, trainer
from tests.phases.trainer import HEALTHY

TORCH = {"13.0": "2.13.0", "12.8": "2.13.0+cu128", None: "2.13.0+cpu"}
NCCL = "2.27.7"
LOG_EVERY = 20
SHA = "5eed" * 10
# The first block and the last two are always among those that a query attends to.
_FORCED_BLOCKS = 3
# Of the time in which the device waits, what passes outside every operator, so in Python.
_PYTHON = 0.38


def write_tables(folder: Path, rank: Rank, stop: int) -> None:
    """training.csv of the first `stop` steps, val.csv and gates.csv."""
    job, steps = rank.job, rank.steps
    rows, inside = [], 0
    for at in range(stop):
        block = job.blocks[steps.block[at]]
        inside = inside + 1 if at and steps.block[at] == steps.block[at - 1] else 1
        dt = float(steps.dt_s[at])
        rows.append(
            files.row(
                at + 1,
                loss=float(steps.loss[at]),
                lr=float(steps.rate[at]),
                toks_per_s=round(job.plan.tokens_per_step / dt, 3),
                tokens=job.plan.tokens_per_step,
                dt_s=dt,
                grad_norm=float(steps.norm[at]),
                mem_mib=rank.memory(at + 1)[1],
                arm=block.arm,
                block=block.index,
                warmup=int(inside <= block.warmup_steps),
                fetch_s=float(steps.fetch_s[at]),
            )
        )
    files.write_rows(folder, [files.HEADER, *rows])
    seen = [step for step in range(1, stop + 1) if job.evaluates(step)]
    told_of = [f"{step},{float(steps.loss[step - 1]) + 0.01!r}" for step in seen]
    (folder / VAL_CSV).write_text("\n".join([",".join(names(VAL_COLUMNS)), *told_of, ""]))
    blocks = _blocks_read(job, job.model.attention.n_sel)
    selected: tuple[object, ...] = (blocks, _blocks_read(job, _FORCED_BLOCKS) / blocks)
    if job.plan.toggles.flag("NSA_DISABLE_AUX_STATS"):
        selected = ("", "")
    lines = [",".join(names(GATES_COLUMNS))]
    for step in [1, *range(LOG_EVERY, stop + 1, LOG_EVERY)]:
        # All layers are alike, so they are their mean; the last digits of readings differ.
        entropy, largest = GATES[0] + 1e-12 * step, GATES[1]
        told = [step, entropy, largest, entropy, largest, *GATES[2:], *selected]
        lines.append(",".join(map(str, told)))
    (folder / GATES_CSV).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _blocks_read(job: Job, most: int) -> float:
    """Blocks that a query attends to, on average, where it may attend to so many."""
    seq_len, l_sel = job.train.seq_len, job.model.attention.l_sel
    return sum(min(most, at // l_sel + 1) for at in range(seq_len)) / seq_len


def env_document(machine: Machine, job: Job, launch: Launch, argv: Sequence[str]) -> dict[str, Any]:
    """env.json: what was asked for, and what really ran."""
    profile = load_profile(machine.profile)
    made = trainer.env(launch, profile)
    # The folder of the trainer's package is this machine's.
    del made["package"]
    floor, device = floor_of(job), torch.device("cuda")
    told = effective(
        job.plan, device=device, n_params=job.parameters, floor=floor, floor_source=job.dataset
    )
    attention = trainer.attention(
        profile.workload_of(launch.phase), machine.windows.get(job.where, "triton")
    )
    if not machine.self_test:
        attention["self_test"] |= {"ran": False, "reason": "NSA_SELF_TEST=off", "paths": {}}
    return {
        **made,
        "run_token": job.token,
        "argv": list(argv),
        "git": {**made["git"], "branch": "main", "sha": SHA},
        "versions": {
            "torch": TORCH[machine.torch_cuda],
            "cuda": machine.torch_cuda,
            "nccl": NCCL,
            "driver": machine.driver.version,
            **machine.versions.get(launch.phase, {}),
        },
        "device": {
            "type": "cuda",
            "name": machine.card.name,
            "count": machine.devices,
            # torch writes them without nvidia-smi's prefix.
            "uuids": [machine.uuid(r).removeprefix("GPU-") for r in range(job.ranks)],
        },
        "config": job.plan.config.model_dump(),
        "effective": {**told, "dataset": job.dataset},
        "attention": attention,
    }


def audit_document(machine: Machine, job: Job) -> dict[str, Any]:
    """sdpa_audit.json: in each branch the kernel of the first pass of each arm."""
    arm = traces.audit(machine.kernels)["arms"]["default"]
    return {"arms": {block.arm: arm for block in job.blocks}}


def console(job: Job, steps: Steps, stop: int) -> list[str]:
    """What rank 0 prints."""
    tokens = job.plan.tokens_per_step
    kinds = {b.toggles.text("NSA_DDP_COMPRESS") for b in job.blocks} if job.plan.ddp else set()
    lines = [
        f"[config] {job.parameters:,} parameters, S={job.train.seq_len}, "
        f"{job.ranks} rank(s) on cuda, dataset {job.dataset}"
    ]
    lines += [f"[ddp] gradient compression enabled: {kind}" for kind in sorted(kinds - {"off"})]
    lines += [f"[arms] {b.arm} cannot run: No available kernel." for b in job.refused]
    lines += [
        f"[step {at + 1}] loss={steps.loss[at]:.4f} tok/s={tokens / steps.dt_s[at]:.1f}"
        for at in range(0, stop, LOG_EVERY)
    ]
    return lines


def write_profile(folder: Path, machine: Machine, job: Job, steps: Steps) -> None:
    """The summary of the watched steps, and a trace, which no judge reads."""
    profiled, accumulation = job.plan.flags.profile_steps, job.train.accumulate_grad_batches
    batches = profiled * accumulation
    device = float(np.mean(steps.busy[20:, 0] * steps.dt_s[20:])) / accumulation
    window = max(device, HOST_S * machine.trains(0).host * PROFILED_HOST)
    gpu = {"window_us": window, "busy_us": device, "idle_us": window - device}
    gpu["python_wait_us"] = _PYTHON * (window - device)
    summary = {
        **HEALTHY["profile"],
        "steps": profiled,
        "wall_us": 1e6 * window * batches,
        "gpu": {name: round(1e6 * seconds * batches, 1) for name, seconds in gpu.items()},
    }
    (folder / PROFILE_JSON).write_text(json.dumps(summary), encoding="utf-8")
    with gzip.open(folder / TRACE_FILE, "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": []}, stream)


def junit(machine: Machine, launch: Launch) -> bytes:
    """The JUnit file of the shipped tests that this launch runs."""
    suite = ET.Element("testsuite", name="pytest")
    for case in traces.junit(launch.name, launch.run_dir, "cuda").cases:
        told = ET.SubElement(
            suite, "testcase", classname=case.classname, name=case.name, time="0.8"
        )
        properties = {**case.properties, "v1_over_v2_ratio_lower_99": f"{machine.v2_speedup:.3f}"}
        listed = ET.SubElement(told, "properties")
        for name, value in properties.items():
            ET.SubElement(listed, "property", name=name, value=value)
        if case.classname.rpartition(".")[2] in machine.failing_tests:
            ET.SubElement(told, "failure", message="not equal")
    return ET.tostring(suite, encoding="utf-8", xml_declaration=True)
