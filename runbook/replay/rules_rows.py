"""Rules about what a report has to contain: configs, phases, rows, receipts."""

from __future__ import annotations

from collections.abc import Iterator

from runbook.decide import Answer, meets_target
from runbook.records.outcome import Outcome
from runbook.replay.contradiction import Contradiction, contradiction
from runbook.replay.models import PHASE_NAMES, ReplayFile, Status

__all__ = ["OPTIONAL_PHASES", "ROW_RULES"]

OPTIONAL_PHASES = ("fused_adamw", "fineweb")


def below_floor(replay: ReplayFile) -> Iterator[Contradiction]:
    """The acceptance config against the floor."""
    floor = replay.acceptance.min_toks_per_s
    claims = [row.claim for row in replay.scored if row.row == "throughput"]
    for result in replay.results("baseline"):
        if result.config != replay.acceptance.config or result.span is None:
            continue
        if meets_target([result.span[1]], floor).outcome is Answer.FAIL:
            yield contradiction(
                "acceptance.throughput",
                "baseline",
                claimed=", ".join(claims),
                found=f"{result.config}: {rates(result.span)} toks/s, floor {floor:g}",
                outcome=Outcome.FAIL,
            )


def scored_elsewhere(replay: ReplayFile) -> Iterator[Contradiction]:
    """A throughput row that was measured on another config."""
    wanted = replay.acceptance.config
    for row in replay.scored:
        if row.row == "throughput" and row.config and row.config != wanted:
            seen, asked = replay.configs[row.config], replay.configs[wanted]
            value = f" {row.value:g} toks/s" if row.value else ""
            yield contradiction(
                "acceptance.config",
                "baseline",
                claimed=f"{row.claim}{value}",
                found=f"measured on {row.config} ({seen}), asked for {wanted} ({asked})",
                outcome=Outcome.INVALID,
            )


def rows_missing(replay: ReplayFile) -> Iterator[Contradiction]:
    """Rows that the acceptance table must have."""
    there = {row.row for row in replay.scored}
    for name in replay.acceptance.rows:
        if name not in there:
            yield contradiction(
                "acceptance.row_missing",
                "acceptance",
                claimed=replay.claimed_verdict,
                found=f"the acceptance table has no row {name}",
                outcome=Outcome.INCOMPLETE,
            )


def not_completed(replay: ReplayFile) -> Iterator[Contradiction]:
    """Required phases that did not come to their end."""
    for name in PHASE_NAMES:
        status = replay.status(name)
        if status is Status.COMPLETED or name in OPTIONAL_PHASES:
            continue
        crashed = status is Status.CRASHED
        yield contradiction(
            "phase.not_completed",
            name,
            claimed=replay.table(name).claim,
            found=status.value.replace("_", " "),
            outcome=Outcome.FAIL if crashed else Outcome.INCOMPLETE,
        )


def parts(replay: ReplayFile) -> Iterator[Contradiction]:
    """Parts of a phase that failed or were left out although it is called done."""
    for name, table in replay.phases.items():
        if table.failed:
            rule = "parity.failed" if name == "v2_parity" else "phase.not_completed"
            failed = ", ".join(table.failed)
            yield contradiction(
                rule, name, claimed=table.claim, found=f"{failed} failed", outcome=Outcome.FAIL
            )
        if table.not_run:
            yield contradiction(
                "phase.part_not_run",
                name,
                claimed=table.claim,
                found=f"no result of {', '.join(table.not_run)}",
                outcome=Outcome.INCOMPLETE,
            )


def no_receipts(replay: ReplayFile) -> Iterator[Contradiction]:
    """Throughput numbers that nobody can trace."""
    lines = [line for table in replay.phases.values() for line in table.results]
    bare = [line for line in lines if not (line.csv and line.window)]
    if bare:
        yield contradiction(
            "window.no_receipt",
            "all",
            claimed=f"{len(lines)} throughput results",
            found=f"{len(bare)} of them name no CSV file and window",
            outcome=Outcome.INCOMPLETE,
        )


def sequential_prefill(replay: ReplayFile) -> Iterator[Contradiction]:
    """A long sequence without the batched prefill path."""
    used = {line.config for table in replay.phases.values() for line in table.results}
    longest = max((replay.configs[name].seq_len for name in used if name), default=0)
    if longest >= 1024 and replay.env.get("NSA_PREFILL_BATCHED") != "1":
        yield contradiction(
            "config.sequential_prefill",
            "baseline",
            claimed="nothing",
            found=f"S={longest} without NSA_PREFILL_BATCHED=1",
            outcome=Outcome.INVALID,
        )


def rates(span: tuple[float, float]) -> str:
    """One rate, or a range of them."""
    low, high = span
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


ROW_RULES = (
    below_floor,
    scored_elsewhere,
    not_completed,
    rows_missing,
    parts,
    sequential_prefill,
    no_receipts,
)
