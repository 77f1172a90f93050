"""The other files of a run directory: tables, env.json, audit, profile, samples, console, tests."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np

from benchmarks.rehearsal.beats import Rank, typed
from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.roofline import HOST_S, OPERATORS
from benchmarks.rehearsal.steps import (
    PROFILED_HOST,
    Job,
    Steps,
    floor_of,
    gate_health,
    seed_of,
)
from nsa.contract import (
    GATES_COLUMNS,
    GATES_CSV,
    PROFILE_JSON,
    TRACE_FILE,
    TRAINING_COLUMNS,
    TRAINING_CSV,
    VAL_COLUMNS,
    VAL_CSV,
    names,
)

TORCH = {"13.0": "2.13.0", "12.8": "2.13.0+cu128", None: "2.13.0+cpu"}
NCCL = "2.27.7"
LOG_EVERY = 20
# The context of CUDA, NCCL and libraries, which no tensor shows, MiB.
CONTEXT_MIB = 620
SAMPLE_EVERY_S = 0.2

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


# -- the profiler ----------------------------------------------------------------------------------

# Operators of the trace that stand for the 2,400 of a micro-batch, and what a layer's ranges are.
_SHOWN = 60
_RANGES = (
    "nsa.cmp",
    "nsa.sel.scores",
    "nsa.sel.ranges_v2",
    "nsa.sel.attend",
    "nsa.win",
    "nsa.gate",
)
# Of the host's time in a micro-batch: outside every operator, so in Python.
_PYTHON = 0.38
_TOP = (
    ("layer.py:88:forward", 0.046),
    ("api.py:131:attend", 0.041),
    ("module.py:1747:_call", 0.038),
)


def write_profile(folder: Path, machine: Machine, job: Job, steps: Steps) -> None:
    """trace_rank0.json.gz as Kineto writes it, and profile_rank0.json computed from its events."""
    first = 5
    device = float(np.mean(steps.busy[20:, 0] * steps.dt_s[20:])) / job.accumulation
    host = HOST_S * machine.trains(0).host * PROFILED_HOST
    events: list[dict[str, Any]] = []
    now = 0.0
    for _ in range(job.profiled * job.accumulation):
        events += _micro_batch(now, host * 1e6, device * 1e6)
        now += max(host, device) * 1e6 + 5.0
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": machine.card.name}],
        "traceEvents": events,
        "displayTimeUnit": "ms",
    }
    with gzip.open(folder / TRACE_FILE, "wt", compresslevel=1, encoding="utf-8") as out:
        json.dump(trace, out)
    summary = _summary(events, job.profiled)
    summary["first_step"] = first + 1
    (folder / PROFILE_JSON).write_text(json.dumps(summary), encoding="utf-8")


def _micro_batch(begin: float, host_us: float, device_us: float) -> list[dict[str, Any]]:
    """Operators on the host, kernels that follow them on stream 7; the kernels queue up."""
    events = []
    each, kernel = host_us / _SHOWN, device_us / _SHOWN
    free = begin
    for number in range(_SHOWN):
        start = begin + number * each
        name = f"aten::mm.{number % 7}" if number % 5 else "aten::_fused_sdp_choice"
        events.append(_event("cpu_op", name, start, each * (1 - _PYTHON), pid=1, tid=1))
        launch = start + each * 0.3
        events.append(_event("cuda_runtime", "cudaLaunchKernel", launch, 4.0, pid=1, tid=1,
                             args={"correlation": number}))  # fmt: skip
        free = max(free, launch + 6.0)
        events.append(_event("kernel", f"ampere_bf16_s16816gemm_{number % 7}", free, kernel,
                             pid=0, tid=7, args={"correlation": number, "stream": 7}))  # fmt: skip
        free += kernel
        if number % 10 == 0:
            name = _RANGES[number // 10 % len(_RANGES)]
            events.append(_event("user_annotation", name, start, each, pid=1, tid=1))
            events.append(_event("gpu_user_annotation", name, free - kernel, kernel, pid=0, tid=7))
    return events


def _event(kind: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": round(ts, 3), "dur": round(dur, 3), **more}


def _summary(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """What the trainer's summary says of such a trace: unions of intervals, by kind."""
    spans: dict[str, list[tuple[float, float]]] = {}
    ranges: dict[str, dict[str, float]] = {}
    for event in events:
        span = (event["ts"], event["ts"] + event["dur"])
        spans.setdefault(event["cat"], []).append(span)
        if event["name"].startswith("nsa."):
            row = ranges.setdefault(event["name"], {"count": 0, "cpu_us": 0.0, "cuda_us": 0.0})
            on_gpu = event["cat"] == "gpu_user_annotation"
            row["count"] += not on_gpu
            row["cuda_us" if on_gpu else "cpu_us"] += round(event["dur"], 1)
    kernels, host = spans["kernel"], [*spans["cpu_op"], *spans["cuda_runtime"]]
    window = max(end for _, end in kernels) - kernels[0][0]
    wall = max(end for _, end in host) - host[0][0]
    inside = [(max(a, kernels[0][0]), b) for a, b in host if b > kernels[0][0]]
    busy = _union(kernels)
    return {
        "ranges": ranges,
        "python_share": round(1 - _union(host) / wall, 4),
        "top_python": [{"name": name, "share": share} for name, share in _TOP],
        "steps": steps,
        "wall_us": round(wall, 1),
        "gpu": {
            "window_us": round(window, 1),
            "busy_us": round(busy, 1),
            "idle_us": round(window - busy, 1),
            "python_wait_us": round(max(0.0, window - _union([*kernels, *inside])), 1),
        },
        "operators_shown": f"{_SHOWN} stand for {OPERATORS}",
    }


def _union(spans: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# -- samples, console, tests -----------------------------------------------------------------------


def write_samples(
    path: Path, columns: Sequence[str], rank: Rank, stop: int, machine: Machine
) -> None:
    """Five samples a second of every GPU of the machine, from the launch's start to its end."""
    steps, job = rank.steps, rank.job
    ends = steps.device_end_s[:stop]
    over = float(ends[-1]) if stop else 0.0
    random = np.random.default_rng(seed_of(job.where, rank.token, "samples"))
    at = np.arange(-12.0, over + 1.2, SAMPLE_EVERY_S)
    place = np.searchsorted(ends, at)
    rows = [",".join(columns)]
    for when, number in zip(at, place, strict=True):
        then = rank.began_s + rank.wall_s + when + 86_400.0 * machine.samples_days
        stamp = datetime.fromtimestamp(then, tz=UTC)
        text = f"{stamp:%Y/%m/%d %H:%M:%S}.{stamp.microsecond // 1000:03d}"
        trains = 0.0 <= when <= over and number < stop
        for index in range(machine.gpus):
            used = trains and index < job.ranks
            share = float(steps.busy[number, index]) if used else 0.0
            told = _sample(machine, rank, index, text, share, number, random)
            # What only NVML could tell stays empty.
            rows.append(",".join(told.get(name, "") for name in columns))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _sample(
    machine: Machine,
    rank: Rank,
    index: int,
    stamp: str,
    share: float,
    step: int,
    random: np.random.Generator,
) -> dict[str, str]:
    """One line, as the sampler keeps it: utilization is the share of time with a kernel running."""
    card, pace = machine.card, machine.trains(index)
    busy = min(100, max(0, round(100 * share + random.normal(0, 1.2)))) if share else 0
    taken = index < rank.job.ranks and step >= 0
    used = CONTEXT_MIB + rank.memory(max(1, step))[2] if taken else 4
    gpu = machine.at_rest(index)
    slow = pace.clock < 0.95 and share > 0
    told = 0x4 if gpu.power_limit_w else 0x0 if index in machine.held_mhz else 0x40
    reason = told if slow else 0x0 if share else 0x1
    clock = card.sm_mhz * pace.clock if share else 210
    loaded = machine.loaded_generation or gpu.pcie_gen_max
    return {
        "timestamp": stamp,
        "index": str(index),
        "utilization_percent": str(busy),
        "memory_used_mib": f"{used:.0f}",
        "memory_total_mib": str(card.memory_mib),
        "power_w": f"{card.power_w * (0.2 + 0.6 * share * pace.clock):.2f}",
        "temperature_c": str(round(34 + 30 * share)),
        "sm_clock_mhz": f"{clock:.0f}",
        "throttle_reasons": f"0x{reason:016X}",
        "pcie_gen": str(loaded if share else gpu.pcie_gen),
        "pcie_width": str(gpu.pcie_width),
        "uuid": gpu.uuid,
        "source": "nvidia-smi",
    }


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
