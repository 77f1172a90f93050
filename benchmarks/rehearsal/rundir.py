"""What the trainer and the tests write of their own: tables, env.json, audit, console, JUnit."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from benchmarks.rehearsal.beats import Rank
from benchmarks.rehearsal.effects import typed
from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.steps import Job, Steps, floor_of, gate_health
from nsa.contract import (
    GATES_COLUMNS,
    GATES_CSV,
    TRAINING_COLUMNS,
    TRAINING_CSV,
    VAL_COLUMNS,
    VAL_CSV,
    names,
)

TORCH = {"13.0": "2.13.0", "12.8": "2.13.0+cu128", None: "2.13.0+cpu"}
NCCL = "2.27.7"
LOG_EVERY = 20
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


def env_document(machine: Machine, job: Job, config: Mapping[str, Any], launch: Launched) -> Any:
    """env.json: what was asked for, and what really ran."""
    shape = job.shape
    given = {k: v for k, v in launch.env.items() if k.startswith("NSA_")}
    effective = {
        "seq_len": shape.seq_len,
        "global_batch": job.global_batch,
        "per_rank_batch": job.per_rank,
        "accumulation": job.accumulation,
        "tokens_per_step": job.tokens,
        "steps": job.last_step,
        "schedule_steps": job.schedule_steps,
        "n_layers": shape.layers,
        "n_params": shape.parameters,
        "vocab_size": shape.vocabulary,
        "dtype": config["runtime"]["precision"],
        "master_dtype": "fp32",
        "device": "cuda",
        "attention_path": "batched",
        "attention_path_reason": "NSA_PREFILL_BATCHED=1",
        "gradient_checkpointing": job.recompute,
        "gradient_checkpointing_reason": "off under DDP" if job.ddp else "from the config",
        "model_flops_per_token": shape.model_flops_per_token,
        "loss_floor": floor_of(job),
        "loss_floor_source": "entropy rate" if job.dataset == "markov" else "ln(vocabulary)",
        "dataset": job.dataset,
    }
    compared = {k: v for k, v in effective.items() if k not in ("steps", "per_rank_batch")}
    compared = {k: v for k, v in compared.items() if "reason" not in k and "schedule" not in k}
    arms = {"schema_version": 1, "warmup_steps": job.blocks[0].warmup, "blocks": launch.arms}
    return {
        "schema_version": 1,
        "run_token": launch.token,
        "started_at": "2026-01-01T00:00:00Z",
        "argv": list(launch.argv),
        "git": {"branch": "main", "sha": "5eed" * 10, "dirty": False, "diff_sha256": None},
        "versions": {
            "python": "3.11.7",
            "torch": TORCH[machine.torch_cuda],
            "cuda": machine.torch_cuda,
            "nccl": NCCL,
            "driver": machine.driver.version,
            "triton": "3.7.1",
            **machine.versions.get(job.where.partition("/")[0], {}),
        },
        "world_size": job.ranks,
        "device": {
            "type": "cuda",
            "name": machine.card.name,
            "count": machine.devices,
            # torch writes them without nvidia-smi's prefix.
            "uuids": [machine.uuid(r).removeprefix("GPU-") for r in range(job.ranks)],
        },
        "config": config,
        "config_sha256": hashlib.sha256(
            json.dumps([compared, config["model"], config["nsa"]], sort_keys=True).encode()
        ).hexdigest(),
        "effective": effective,
        "attention": _attention(machine, job, config["runtime"]["precision"]),
        "toggles": [
            {"name": name, "value": typed(name, text), "default": None, "source": "environment"}
            for name, text in given.items()
        ],
        "passthrough": [],
        "notes": [],
        "arms": arms if launch.arms else None,
    }


def _attention(machine: Machine, job: Job, precision: str) -> Any:
    """How the window branch runs, and what the trainer tested before its first step."""
    way = machine.windows.get(job.where, machine.window)
    agrees = {
        "agrees": True,
        "refused": None,
        "problems": [],
        "whole": dict.fromkeys(("out", "q", "k_win", "v_win"), 2.4e-3),
        "row": dict.fromkeys(("out", "q", "k_win", "v_win"), 9.1e-3),
        "blocks_illegal": 0,
        "blocks_shortfall": 0.0,
        "seconds": 0.4,
    }
    tested = machine.self_test
    return {
        "window": {"value": way, "reason": "auto: measured before the first step"},
        "self_test": {
            "ran": tested,
            "reason": "device cuda" if tested else "NSA_SELF_TEST=off",
            "seq_len": job.shape.seq_len,
            "dtype": {"bf16": "bfloat16", "fp32": "float32"}[precision],
            "bound": {"whole": 0.02, "row": 0.1},
            "paths": {way: agrees} if tested else {},
        },
    }


class Launched:
    """What a launch was started with."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], token: str, arms: Sequence[Any]
    ) -> None:
        self.argv, self.env, self.token, self.arms = argv, env, token, arms


_OPERATORS_OF = {
    "explicit_softmax": "aten::_softmax",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "flash": "aten::_scaled_dot_product_flash_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}


def audit_document(machine: Machine, job: Job) -> Any:
    """sdpa_audit.json: in each branch the kernel of the first pass of each arm."""
    layers = job.shape.layers

    def branch(kernel: str) -> Any:
        ops = {_OPERATORS_OF[one]: layers for one in kernel.split("+") if one in _OPERATORS_OF}
        return {"kernel": kernel, "ops": ops}

    branches = {name: branch(kernel) for name, kernel in machine.kernels.items()}
    return {"arms": {block.arm: {"branches": branches} for block in job.blocks}}


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
