"""What follows from a run's record: its reports, and what it says where its disk refused files."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from runbook.config import registry
from runbook.config.registry import report_files
from runbook.errors import UsageError, did_you_mean
from runbook.files import write_atomic
from runbook.records import THE_RUN, PhaseRecord, RunRecord, Verdict
from runbook.records.run import Screen


def format_problems(names: Iterable[str]) -> list[str]:
    """One sentence for each name that is no report format."""
    known = registry.report_names()
    return [
        f"{name!r}: no such format{did_you_mean(name, known)}; there are: {', '.join(known)}"
        for name in names
        if name not in known
    ]


def render(record: RunRecord, name: str, screen: Screen | None = None) -> str:
    """The record in one format, a function of the record alone. Raises UsageError."""
    if problems := format_problems([name]):
        raise UsageError(problems)
    return registry.reports()[name].text(record, screen)


def write_reports(record: RunRecord, run_root: Path, names: Iterable[str]) -> list[Path]:
    """Write the reports into the run's folder, each replaced at once, and return their paths.

    Everything is rendered before the first file changes. Raises UsageError for unknown formats.
    """
    wanted = list(dict.fromkeys(names))
    if problems := format_problems(wanted):
        raise UsageError(problems)
    files = report_files()
    texts = {run_root / files[name]: render(record, name) for name in wanted}
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)


_THEN = "then continue the run with --resume, or start it anew with another --out"
_FULL = f"free space on the disk of --out first (`df -h` shows it; a quota: `quota`), {_THEN}"
# By errno.
REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: f"raise the limit of a file's size first (`ulimit -f unlimited`), {_THEN}",
}
_NOT_WRITABLE = f"make the folder of the run writable again first, {_THEN}"


# How the reason begins, by which a screen knows it.
NOT_WRITTEN = "the run's files cannot be written"


def refused(record: RunRecord, error: OSError, what: str) -> RunRecord:
    """The record as far as it came, never GO; what it has not come to says what to do first.

    `what`: file and error, in words.
    """
    remedy = REMEDIES.get(error.errno or 0, _NOT_WRITABLE)
    fields = {
        "phases": tuple(_remedied(phase, remedy) for phase in record.phases),
        "verdict": Verdict.NO_GO if record.verdict is Verdict.NO_GO else Verdict.INCOMPLETE,
        "reasons": (f"{NOT_WRITTEN} ({what})", *record.reasons[:1]),
    }
    return record.model_copy(update=fields)


def _remedied(phase: PhaseRecord, remedy: str) -> PhaseRecord:
    checks = tuple(
        check.model_copy(update={"remedy": remedy}) if check.follows == THE_RUN else check
        for check in phase.checks
    )
    return phase.model_copy(update={"checks": checks})
