"""Runs on disk, found by name and read; and what stays on the screen after one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runbook.console import Console
from runbook.errors import RunbookError, UsageError, did_you_mean

if TYPE_CHECKING:
    from runbook.records import Check, Measurement, PhaseRecord, RunRecord


def headline(record: PhaseRecord) -> str:
    """A throughput with sample size and limit if one was measured, and the passed checks."""
    from runbook.records import Outcome
    from runbook.records.measurement import TOKENS_PER_SECOND

    passed = sum(check.outcome is Outcome.PASS for check in record.checks)
    shown = sum(check.outcome is not Outcome.SKIPPED for check in record.checks)
    count = f"{passed} of {shown} checks" if shown else "no checks"
    for check in record.checks:
        if check.measurement is not None and check.measurement.unit == TOKENS_PER_SECOND:
            return f"{_rate(check, check.measurement)}  {count}"
    return count


def _rate(check: Check, measured: Measurement) -> str:
    from runbook.records import Comparator
    from runbook.records.measurement import plain_number

    spread = f" +- {measured.stdev:.3g}" if measured.stdev is not None else ""
    text = f"{plain_number(measured.value)}{spread} {measured.unit} (n={measured.n})"
    if isinstance(check.limit, int | float) and check.comparator is not Comparator.NONE:
        text += f" {check.comparator.value} {check.limit:g}"
    return text


_RECORD = "run.json"


def near(path: str | Path) -> str:
    """The path as one would type it here: relative if it lies below the current folder."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def run_folders(out_dir: Path) -> list[Path]:
    """The folders of `out_dir` that hold a run, oldest first (an id begins with its UTC time)."""
    if not out_dir.is_dir():
        return []
    return sorted(
        (folder for folder in out_dir.iterdir() if (folder / _RECORD).is_file()),
        key=lambda folder: folder.name,
    )


def find_run(text: str | None, out_dir: Path) -> Path:
    """The run that `text` names; without it the newest one of `out_dir`. Raises UsageError."""
    folders = run_folders(out_dir)
    if text is None:
        if not folders:
            raise UsageError(
                f"no run in {out_dir}/", hint="`runbook run` starts one, --out names another folder"
            )
        return folders[-1]
    path = Path(text)
    if path.name == _RECORD and path.is_file():
        return path.parent
    if (path / _RECORD).is_file():
        return path
    matches = [folder for folder in folders if folder.name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    names = [folder.name for folder in folders]
    if matches:
        raise UsageError(
            f"{text!r} fits several runs in {out_dir}/: "
            f"{', '.join(folder.name for folder in matches)}"
        )
    known = f"runs in {out_dir}/: {', '.join(names[-5:])}" if names else f"no run in {out_dir}/"
    raise UsageError(
        f"no run {text!r}: neither a folder with {_RECORD} nor the start of a run's id"
        f"{did_you_mean(text, names)}",
        hint=known,
    )


def load_run(folder: Path) -> RunRecord:
    """Read run.json. Raises RunbookError if it is damaged or of another version."""
    from pydantic import ValidationError

    from runbook.records import RunRecord

    path = folder / _RECORD
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunbookError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise RunbookError(
            f"{path} is not a run record of this version: {place}: {first['msg']}"
            f" ({error.error_count()} problems in total)"
        ) from error


def print_summary(console: Console, record: RunRecord, folder: Path) -> None:
    """Print the verdict with its scope, each failure with `try` and `rerun`, and the report.

    A quiet console gets the verdict's line and the report's path. After an interruption every row
    that has no evidence would say so; the way to go on is what counts then.
    """
    from runbook.engine.outputs import render
    from runbook.records.run import Screen

    text = render(record, "terminal", Screen(color=console.color_out, brief=True)).rstrip("\n")
    short = console.quiet or record.interrupted
    console.result(text.partition("\n")[0] if short else text)
    if record.interrupted:
        console.result(f"resume  runbook run --resume {near(folder)}")
    for name in ("report.html", "report.md"):
        if (folder / name).is_file():
            console.result(f"report  {near(folder / name)}")
