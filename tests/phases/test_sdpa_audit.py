"""The SDPA audit: which kernel served which branch, and which setting is unusable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runbook.config.phase import PlanContext
from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder, spoil, traces
from tests.phases.answers import CRASHED, FINE, NO_EFFECT, UNLIKE, WARNED, WHERE, WRONG, case


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
def test_an_audit_that_saw_nothing_is_invalid(holds: Callable[[], None]) -> None:
    """An unexpected fallback fails, and which setting is unusable is told."""
    holds()


def test_the_kernel_table_names_every_branch_of_every_arm() -> None:
    found = builder.evidence("sdpa_audit", WHERE)
    (table,) = builder.judge("sdpa_audit", found, WHERE).tables
    assert table.rows[0] == ("default", "explicit_softmax", "flash", "flash")
    assert table.rows[2] == ("no_flash", "explicit_softmax", "efficient", "efficient")
