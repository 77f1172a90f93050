"""What the trainer and the tests write of their own: tables, env.json, audit, console, JUnit."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.trainer.beats import Rank
from benchmarks.rehearsal.trainer.steps import Job, Steps, floor_of, gate_health
from nsa.contract import (
    GATES_COLUMNS,
    GATES_CSV,
    TRAINING_COLUMNS,
    TRAINING_CSV,
    VAL_COLUMNS,
    VAL_CSV,
    names,
)
from runbook.config.load import load_profile
from runbook.records import Launch
from tests.phases import builder, traces

TORCH = {"13.0": "2.13.0", "12.8": "2.13.0+cu128", None: "2.13.0+cpu"}
NCCL = "2.27.7"
LOG_EVERY = 20
SHA = "5eed" * 10
# The first block and the last two are always among those that a query attends to.
_FORCED_BLOCKS = 3


def write_tables(folder: Path, rank: Rank, stop: int) -> None:
    """training.csv of the first `stop` steps, and gates.csv."""
    job, steps = rank.job, rank.steps
    columns = names(TRAINING_COLUMNS)
    with (folder / TRAINING_CSV).open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(columns)
        inside = 0
        for at in range(stop):
            block = job.blocks[steps.block[at]]
            inside = inside + 1 if at and steps.block[at] == steps.block[at - 1] else 1
            dt = float(steps.dt_s[at])
            row = {
                "step": at + 1,
                "loss": repr(float(steps.loss[at])),
                "lr": repr(float(steps.rate[at])),
                "toks_per_s": round(job.tokens / dt, 3),
                "tokens": job.tokens,
                "dt_s": dt,
                "grad_norm": repr(float(steps.norm[at])),
                "mem_mib": rank.memory(at + 1)[1],
                "arm": block.arm,
                "block": block.index,
                "warmup": int(inside <= block.warmup),
                "fetch_s": float(steps.fetch_s[at]),
                "host_s": 0.0009,
            }
            table.writerow([row[name] for name in columns])
    seen = [step for step in range(1, stop + 1) if job.evaluates(step)]
    told_of = [f"{step},{float(steps.loss[step - 1]) + 0.01!r}" for step in seen]
    (folder / VAL_CSV).write_text("\n".join([",".join(names(VAL_COLUMNS)), *told_of, ""]))
    lines = [",".join(names(GATES_COLUMNS))]
    blocks = job.shape.blocks_read(job.shape.selected)
    selected: tuple[object, ...] = (blocks, job.shape.blocks_read(_FORCED_BLOCKS) / blocks)
    if job.blocks[0].settings.get("NSA_DISABLE_AUX_STATS") == "1":
        selected = ("", "")
    for step in [1, *range(LOG_EVERY, stop + 1, LOG_EVERY)]:
        if step <= stop:
            health = gate_health(job, rank.token, step)
            told = [step, *health[:2], *health, *selected]  # layers that are alike are their mean
            lines.append(",".join(map(str, told)))
    (folder / GATES_CSV).write_text("\n".join(lines) + "\n", encoding="utf-8")


def env_document(
    machine: Machine, job: Job, config: Mapping[str, Any], launch: Launch, argv: Sequence[str]
) -> dict[str, Any]:
    """env.json: what was asked for, and what really ran; the run's token is not in it."""
    shape, profile = job.shape, load_profile(machine.profile)
    made = traces.env(launch, builder.batch_of(launch, profile))
    # The folder of the trainer's package is this machine's.
    del made["package"]
    effective = {
        **made["effective"],
        "n_layers": shape.layers,
        "n_params": shape.parameters,
        "gradient_checkpointing": job.recompute,
        "model_flops_per_token": shape.model_flops_per_token,
        "loss_floor": floor_of(job),
        "schedule_steps": job.schedule_steps,
        "steps": job.last_step,
    }
    attention = traces.attention(
        profile.workload_of(launch.phase), machine.windows.get(job.where, machine.window)
    )
    if not machine.self_test:
        attention["self_test"] |= {"ran": False, "reason": "NSA_SELF_TEST=off", "paths": {}}
    return {
        **made,
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
        "config": dict(config),
        "effective": effective,
        "attention": attention,
    }


def audit_document(machine: Machine, job: Job) -> dict[str, Any]:
    """sdpa_audit.json: in each branch the kernel of the first pass of each arm."""
    arm = traces.audit(machine.kernels)["arms"]["default"]
    return {"arms": {block.arm: arm for block in job.blocks}}


def console(job: Job, steps: Steps, stop: int) -> list[str]:
    """What rank 0 prints."""
    kinds = {b.settings.get("NSA_DDP_COMPRESS", "off") for b in job.blocks} if job.ddp else set()
    lines = [
        f"[config] {job.shape.parameters:,} parameters, S={job.shape.seq_len}, "
        f"{job.ranks} rank(s) on cuda, dataset {job.dataset}"
    ]
    lines += [f"[ddp] gradient compression enabled: {kind}" for kind in sorted(kinds - {"off"})]
    lines += [f"[arms] {b.arm} cannot run: No available kernel." for b in job.refused]
    lines += [
        f"[step {at + 1}] loss={steps.loss[at]:.4f} tok/s={job.tokens / steps.dt_s[at]:.1f}"
        for at in range(0, stop, LOG_EVERY)
    ]
    return lines


_TESTS = {
    "test_equiv_small": ("test_all_paths_agree",),
    "test_group_consistency": ("test_heads_of_a_group_read_the_same_blocks",),
    "test_whole_model": ("test_logits_are_those_of_the_equations",),
    "test_documents": ("test_training_reads_its_documents_in_order_and_again",),
    "test_safeguards": ("test_training_stops_at_a_number_that_is_not_finite",),
    "test_selection_v2_equiv": tuple(
        f"test_equivalence_various_patterns[{name}]" for name in ("random", "gaps", "ends")
    ),
    "test_performance_guards": tuple(
        f"test_v2_performance_improvement[{size}]" for size in (512, 2048)
    ),
}


def junit(machine: Machine, argv: Sequence[str]) -> str:
    """The JUnit file of the shipped tests that this command names."""
    cases = []
    for module in [m for m in _TESTS if any(word.endswith(m) for word in argv)]:
        for name in _TESTS[module]:
            properties = {"device": "cuda"}
            if "performance" in name:
                properties["v1_over_v2_ratio_lower_99"] = f"{machine.v2_speedup:.3f}"
            told = "".join(
                f"<property name={quoteattr(k)} value={quoteattr(v)}/>"
                for k, v in properties.items()
            )
            broken = '<failure message="not equal"/>' if module in machine.failing_tests else ""
            cases.append(
                f'<testcase classname="nsa.tests.{module}" name={quoteattr(name)} time="0.8">'
                f"<properties>{told}</properties>{broken}</testcase>"
            )
    return (
        '<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" '
        f'tests="{len(cases)}">{"".join(cases)}</testsuite></testsuites>'
    )
