"""What stays on the screen after a run: verdict, what went wrong and what to do, report path."""

from __future__ import annotations

from pathlib import Path

from runbook.console import Console, printable
from runbook.records import Check, Outcome, RunRecord, Verdict

__all__ = ["print_summary"]

_VERDICT_STYLES = {Verdict.GO: "good", Verdict.NO_GO: "bad", Verdict.INCOMPLETE: "unsure"}
_REPORTS = ("report.html", "report.md")


def print_summary(console: Console, record: RunRecord, folder: Path) -> None:
    """Print the verdict with its scope, each failure with `try` and `rerun`, and the report."""
    word = console.paint(record.verdict.value, _VERDICT_STYLES[record.verdict])
    required = set(record.required)
    good = {check.id for check in record.checks() if check.outcome is Outcome.PASS}
    console.result(
        f"{word}  ({printable(record.scope)})  "
        f"{len(good & required)} of {len(required)} required checks passed"
    )
    for reason in record.reasons:
        console.result(f"  {printable(reason)}")
    if not console.quiet:
        for check in record.checks():
            if check.outcome not in (Outcome.PASS, Outcome.SKIPPED):
                _print_check(console, check, required=check.id in required)
    for name in _REPORTS:
        if (folder / name).is_file():
            console.result(f"report  {folder / name}")


def _print_check(console: Console, check: Check, *, required: bool) -> None:
    word = console.paint(check.outcome.value, "bad" if check.outcome is Outcome.FAIL else "unsure")
    mark = "" if required else "  (not required)"
    console.result(f"{word}  {check.id}{mark}  {printable(check.reason)}")
    for path in check.evidence:
        console.result(f"    see    {printable(path)}")
    if check.remedy:
        console.result(f"    try    {printable(check.remedy)}")
    if check.rerun:
        console.result(f"    rerun  {printable(check.rerun)}")
