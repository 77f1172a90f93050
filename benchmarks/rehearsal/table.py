"""The table of machines and verdicts, for a screen and for benchmarks/results/rehearsal.md."""

from __future__ import annotations

from collections.abc import Sequence

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


def screen(results: Sequence[Judged]) -> str:
    """Machine, verdict, the rows that stopped it and those that should, one line each."""
    lines = [NOTICE, ""]
    for result in results:
        mark = "ok " if result.as_expected else "BAD"
        machine = result.machine
        lines.append(f"{mark} {machine.name:22} {machine.profile:14} {result.verdict:10} "
                     f"stopped by: {stops(result)}")  # fmt: skip
        if not result.as_expected:
            lines.append(f"    should be: {', '.join(machine.stopped_by) or 'GO'}")
            for row in result.stopped_by[:_SHOWN]:
                lines.append(f"    {row} {result.reasons[row][:300]}")
    good = sum(result.as_expected for result in results)
    lines += ["", f"{good} of {len(results)} machines judged as they should be. {NOTICE}"]
    return "\n".join(lines)


def page_table(results: Sequence[Judged]) -> str:
    """The table of benchmarks/results/rehearsal.md."""
    lines = [
        "| machine | profile | what is wrong | should be stopped by | verdict | stopped by |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_line(result) for result in results]
    return "\n".join(lines)


def _line(result: Judged) -> str:
    machine = result.machine
    cells = (
        f"`{machine.name}`", machine.profile, machine.story, should(machine), result.verdict,
        stops(result),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def should(machine: Machine) -> str:
    """The rows that have to stop it, or GO."""
    return ", ".join(machine.stopped_by) or "nothing: GO"
