"""The table of machines and verdicts, on the screen and in benchmarks/results/rehearsal.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.program import markdown_table
from benchmarks.rehearsal.judged import Judged
from benchmarks.rehearsal.machine import Machine

NOTICE = "A rehearsal on generated evidence: nothing in it was measured, and no GPU took part."
BEGIN, END = "<!-- rehearsal: begin -->", "<!-- rehearsal: end -->"
_SHOWN = 4


def stops(result: Judged) -> str:
    """The rows that stopped a machine: those that should have, then others with a cause.

    Rows that only lack evidence, because something else went wrong before, are not told.
    """
    own = [row for row in result.machine.stopped_by if row in result.stopped_by]
    others = [
        row
        for row in result.stopped_by
        if row not in own and not result.reasons[row].startswith("INCOMPLETE")
    ]
    shown = (own + others)[:_SHOWN] or list(result.stopped_by[:_SHOWN])
    more = ", ..." if len(own + others) > _SHOWN else ""
    return ", ".join(shown) + more if shown else "-"


def page_table(results: Sequence[Judged]) -> str:
    """The table of benchmarks/results/rehearsal.md."""
    header = ("machine", "profile", "what is wrong", "should be stopped by", "verdict",
              "stopped by")  # fmt: skip
    rows = []
    for result in results:
        machine = result.machine
        told = (f"`{machine.name}`", machine.profile, machine.story, should(machine))
        rows.append((*told, result.verdict, stops(result)))
    return markdown_table(header, rows).rstrip("\n")


def problem(result: Judged) -> str:
    """Why a machine is not judged as it should be."""
    why = [f"    {row} {result.reasons[row][:300]}" for row in result.stopped_by[:_SHOWN]]
    head = f"BAD {result.machine.name}: {result.verdict}; should be: {should(result.machine)}"
    return "\n".join([head, *why])


def should(machine: Machine) -> str:
    """The rows that have to stop it, or GO."""
    return ", ".join(machine.stopped_by) or "nothing: GO"
