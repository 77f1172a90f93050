"""The SDPA audit: which kernel served which branch, and which setting is unusable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runbook.config.phase import PlanContext
from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder, spoil, traces
from tests.phases.answers import (
    CRASHED,
    FINE,
    IMPOSSIBLE,
    NO_EFFECT,
    NOTHING,
    TOO_MUCH,
    UNLIKE,
    WARNED,
    WHERE,
    WRONG,
    case,
    row,
    says,
)


def kernels(**found: str) -> spoil.Change:
    return spoil.parts(
        audit=traces.audit({"cmp": "explicit_softmax", "sel": "flash", "win": "flash", **found})
    )


def forbidden(name: str) -> PlanContext:
    return replace(WHERE, toggles={name: "1"})


SAFE = "NSA_DDP_SAFE_MODE"
MATH = kernels(sel="math")


def refused(*arms: str) -> spoil.Change:
    failures = tuple({"arm": arm, "error": "no kernel for this mask"} for arm in arms)
    return spoil.rank(0, arm_failures=failures)


def out_of_memory(made: LaunchEvidence) -> LaunchEvidence:
    errors = ("another rank could not run it", "out of memory: CUDA out of memory. Tried 2 GiB")
    for rank, error in enumerate(errors):
        made = spoil.rank(rank, arm_failures=({"arm": "no_flash", "error": error},))(made)
    return made


def of(what: str, change: spoil.Change | None, wanted: Any, *words: str, **more: Any) -> Any:
    return case("sdpa_audit", what, change, wanted, *words, **more)


def ended(rows: int) -> spoil.Change:
    return spoil.ended(LaunchStatus.CRASHED, rows=rows)


NONE = (Outcome.INCOMPLETE, Reason.CRASH)
NOT_COMPARED = (Outcome.SKIPPED, Reason.NOT_COMPARABLE)


@pytest.mark.parametrize("holds", [
    of("kernels", MATH, WRONG, "sel: math, expected only triton or flash"),
    # A fallback of flash that a person forbade is no fault and no GO.
    *(of("kernels", MATH, UNLIKE, f"{given}=1 forbids flash, which the profile expects: sel: math",
         where=forbidden(given)) for given in ("NSA_SDPA_NO_FLASH", SAFE)),
    # Under the safe mode flash only is not tried, and the other setting is enough.
    of("flash_only", None, NOT_COMPARED, f"{SAFE}=1 forbids NSA_SDPA_FLASH_ONLY=1",
       where=forbidden(SAFE)),
    of("stable", None, FINE, where=forbidden(SAFE)),
    # Kernels are a set, in which one fallback is still one.
    *(of("kernels", kernels(win=kernel), FINE, kernel)
      for kernel in ("efficient+flash", "flash+efficient", "cudnn+efficient")),
    *(of("kernels", kernels(win=kernel), WRONG, kernel)
      for kernel in ("flash+math", "efficient+flash+math", "none")),
    of("kernels", kernels(win=""), NO_EFFECT),
    # An audit that saw nothing, or without its toggle.
    *(of(what, spoil.parts(audit=audit), NO_EFFECT, remedy=remedy) for what, remedy in
      (("audited", "NSA_SDPA_AUDIT=1"), ("kernels", "profile"))
      for audit in (None, traces.audit({"cmp": "x"}))),
    of("audited", spoil.without_effect("NSA_SDPA_AUDIT"), NO_EFFECT),
    # One unusable setting is an answer, two are a NO-GO, one that did nothing is none.
    of("flash_only", refused("flash_only"), WARNED, "no kernel for this mask"),
    of("stable", refused("flash_only"), FINE),
    of("stable", refused("flash_only", "no_flash"), CRASHED),
    of("no_flash", spoil.without_effect("NSA_SDPA_NO_FLASH"), NO_EFFECT),
    of("no_flash", out_of_memory, WARNED, "out of memory: CUDA", remedy="train.seq_len",
       evidence="heartbeat_rank1"),
    # A crash in the flash arm spares the audit of the default, one in the default fails.
    of("completed", ended(60), WARNED), of("kernels", ended(60), FINE),
    of("flash_only", ended(60), WARNED), of("no_flash", ended(60), NONE),
    of("completed", ended(20), CRASHED),
])  # fmt: skip
def test_what_an_audit_says_of_kernels_and_settings(holds: Callable[[], None]) -> None:
    """An unexpected fallback fails, and which setting is unusable is told."""
    holds()


def test_the_kernel_table_names_every_branch_of_every_arm() -> None:
    found = builder.evidence("sdpa_audit", WHERE)
    (table,) = builder.judge("sdpa_audit", found, WHERE).tables
    assert table.rows[0] == ("default", "explicit_softmax", "flash", "flash")
    assert table.rows[2] == ("no_flash", "explicit_softmax", "efficient", "efficient")


# NVTX: the range is there, the trace is kept, and Python does not dominate.


def profiled(**values: Any) -> spoil.Change:
    return spoil.at("profile", **values)


def on_gpu(**values: float) -> spoil.Change:
    """What the device did in the profiled steps, changed."""
    return spoil.at("profile.gpu", **values)


# 81.92 ms a step: 8,192 tokens at 100,000 tok/s.
STEP_US = 81_920.0
CPU = {"where": builder.context("cpu")}
V1 = {"nsa.sel.ranges_v1": {"count": 9}}
WAITING = on_gpu(busy_us=2e5, idle_us=8e5, python_wait_us=7e5)
BUSY = on_gpu(busy_us=9.9e5, idle_us=1e4, python_wait_us=1e4)
WAITS_INSIDE = on_gpu(busy_us=2e5, idle_us=8e5, python_wait_us=1e5)
NOT_GATED = (Outcome.SKIPPED, Reason.NOT_GATED)


def seen_as(what: str, change: spoil.Change, wanted: Any, *words: str, **more: Any) -> Any:
    return case("nvtx", what, change, wanted, *words, **more)


def top(name: str, share: float, **more: Any) -> spoil.Change:
    return profiled(
        top_python=[{"name": "a", "share": 0.01}, {"name": name, "share": share}], **more
    )


@pytest.mark.parametrize("holds", [
    seen_as("range_present", profiled(ranges=V1), WRONG),
    seen_as("range_present", profiled(ranges={}), NO_EFFECT),
    seen_as("range_present", spoil.without_effect("NSA_NVTX"), NO_EFFECT),
    seen_as("range_present", spoil.parts(profile=None), NOTHING),
    seen_as("trace_kept", spoil.parts(files={}), NOTHING),
    seen_as("python_share", WAITING, TOO_MUCH),
    seen_as("python_share", on_gpu(python_wait_us=4e5), IMPOSSIBLE),
    seen_as("python_share", on_gpu(busy_us=2e6), IMPOSSIBLE),
    seen_as("python_share", profiled(gpu=None), NOTHING),
    seen_as("python_share", profiled(steps=None), NOTHING),
    seen_as("python_share", on_gpu(idle_us=math.nan), NOTHING),
    # Waiting inside operators is not waiting for Python.
    seen_as("python_share", WAITS_INSIDE, FINE, "Python has 12%"),
    # On a CPU it is the share of the time.
    seen_as("python_share", profiled(python_share=1.2), IMPOSSIBLE, **CPU),
    seen_as("python_share", profiled(python_share=-0.2), IMPOSSIBLE, **CPU),
    seen_as("python_share", profiled(python_share=None), NOTHING, **CPU),
    seen_as("python_share", profiled(gpu=None), NOT_GATED, **CPU),
    seen_as("python_hotspot", spoil.both(WAITING, top("sequential_prefill", 0.4)), TOO_MUCH,
       "sequential_prefill: 40%", remedy="NSA_PREFILL_BATCHED=1"),
    seen_as("python_hotspot", profiled(top_python=[]), NOTHING),
])  # fmt: skip
def test_nvtx_rows(holds: Callable[[], None]) -> None:
    holds()


@pytest.mark.parametrize("what", ["python_share", "python_hotspot"])
def test_host_time_that_the_gpu_does_not_wait_for_costs_nothing(what: str) -> None:
    """Launching takes Python 44 % of the host's time, and the GPU is busy all the same."""
    says(row("nvtx", what, spoil.both(BUSY, top("loop", 0.4, python_share=0.44))), FINE)


def test_what_the_profiler_itself_costs_is_not_pythons() -> None:
    """Half of a profiled step is idle, and hardly any of an ordinary one."""
    us = {"window_us": 20.0, "busy_us": 9.5, "idle_us": 10.5, "python_wait_us": 10.5}
    profiler = on_gpu(**{name: steps * STEP_US for name, steps in us.items()})
    text = "busy 77.8 ms of 81.9 ms; of the rest Python has 100%"
    check = says(row("nvtx", "python_share", profiler), FINE, text)
    assert check.measurement.value == pytest.approx(0.05)
