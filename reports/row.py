"""One check as text: what every format, and the search for causes, says of it in the same words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runbook.records import Check, Comparator, Measurement, Outcome, satisfies
from runbook.records.measurement import plain_number
from runbook.text import printable

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One check as text; `check` is None for a required id that the run never reported.

    `path` is where its number is from in words; `files` are those that it names.
    """

    id: str
    phase: str
    question: str
    outcome: str
    code: str
    reason: str
    required: bool
    value: str = ""
    n: str = ""
    window: str = ""
    path: str = ""
    files: tuple[str, ...] = ()
    more_files: int = 0
    limit: str = ""
    limit_source: str = ""
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    rerun: str = ""
    follows: str = ""
    check: Check | None = None

    @property
    def blocks(self) -> bool:
        """True if this row keeps the run from GO."""
        satisfied = self.check is not None and satisfies(self.check)
        return self.required and not satisfied and not self.left_out

    @property
    def left_out(self) -> bool:
        """True if its phase was not asked for."""
        return self.check is not None and self.check.left_out

    @property
    def is_problem(self) -> bool:
        """True if a reader has something to do: all but passes and skips that block nothing."""
        return self.blocks or self.outcome not in (Outcome.PASS, Outcome.SKIPPED)


def row_of(check: Check, required: set[str]) -> CheckRow:
    """The row of a check; `required` are the ids that the run requires."""
    measured = check.measurement
    return CheckRow(
        id=check.id,
        phase=check.phase,
        question=check.question,
        outcome=check.outcome.value,
        code=check.code.value,
        reason=check.reason,
        required=check.required or check.id in required,
        value=_value_of(check),
        n=str(measured.n) if measured else "",
        window=str(measured.window) if measured and measured.window else "",
        path=measured.where if measured else "",
        files=measured.named[0] if measured else (),
        more_files=measured.named[1] if measured else 0,
        limit=limit_text(check),
        limit_source=check.limit_source,
        evidence=check.evidence,
        remedy=check.remedy,
        rerun=check.rerun,
        follows=check.follows,
        check=check,
    )


def missing_row(wanted: str) -> CheckRow:
    """The row of a required id that no check of the run has."""
    return CheckRow(
        id=wanted,
        phase=wanted.partition(".")[0],
        question="Required by the profile.",
        outcome=Outcome.INCOMPLETE.value,
        code="not_run",
        reason="missing: the run has no check with this id",
        required=True,
        remedy="run the phase that gives this check, then judge again",
    )


def _value_of(check: Check) -> str:
    """The number; a bare yes or no that no limit explains has its name: `git.dirty: no`."""
    measured = check.measurement
    if measured is None:
        return ""
    bare = isinstance(measured.value, bool) and check.comparator is Comparator.NONE
    return f"{one_line(measured.name)}: {value_text(measured)}" if bare else value_text(measured)


def shown_value(value: float | int | str | bool | None) -> str:
    """A value on one line; a digest is for programs, so that a page only says where it is."""
    text = one_line(plain_number(value))
    return "digest in run.json" if _DIGEST.fullmatch(text) else text


def value_text(measured: Measurement) -> str:
    """`847.2 ± 4.1 tok/s, interval 840 to 852`."""
    text = shown_value(measured.value)
    if measured.stdev is not None:
        text += f" ± {plain_number(measured.stdev)}"
    if measured.unit:
        text += f" {one_line(measured.unit)}"
    if measured.interval is not None:
        low, high = measured.interval
        text += f", interval {plain_number(low)} to {plain_number(high)}"
    return text


def limit_text(check: Check) -> str:
    """`>= 39 tok/s`, or an empty text where nothing limits the value."""
    if check.comparator is Comparator.IS_TRUE:
        return check.comparator.value
    if check.limit is None:
        return ""
    unit = one_line(check.measurement.unit) if check.measurement else ""
    words = (check.comparator.value, one_line(plain_number(check.limit)), unit)
    return " ".join(word for word in words if word)


def one_line(text: str) -> str:
    """The printable text on one line, runs of white space as one blank."""
    return " ".join(printable(text).split())
