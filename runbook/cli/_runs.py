"""Finished runs, found by name and read; and what is said of one that changed or goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runbook.console import Console
from runbook.defaults import DEFAULT_OUT
from runbook.errors import UsageError, did_you_mean, first_of
from runbook.folder.names import MANIFEST_FILE, RECORD_FILE, run_folders

if TYPE_CHECKING:
    from runbook.records import RunRecord


def find_run(text: str | None, out_dir: Path) -> Path:
    """The run that `text` names; without it the newest one of `out_dir`. Raises UsageError."""
    folders = [one for one in run_folders(out_dir) if (one / RECORD_FILE).is_file()]
    if text is None:
        if not folders:
            raise UsageError(
                f"no run in {out_dir}/", hint="`runbook run` starts one, --out names another folder"
            )
        return folders[-1]
    path = Path(text)
    if path.name == RECORD_FILE and path.is_file():
        return path.parent
    if (path / RECORD_FILE).is_file():
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
        f"no run {text!r}: neither a folder with {RECORD_FILE} nor the start of a run's id"
        f"{did_you_mean(text, names)}",
        hint=known,
    )


def folder_of(named: Path) -> Path:
    """The folder that is there, or may come to be; a bare name that is none is a run's id.

    Raises UsageError for one that fits no run.
    """
    there = named.exists() or len(named.parts) > 1 or named == Path(DEFAULT_OUT)
    return named if there else find_run(str(named), Path(DEFAULT_OUT))


def load_told(folder: Path, console: Console) -> tuple[RunRecord, str]:
    """The record and the `doubt` of it; a warning where that, or an artifact that changed, is one.

    A link in the run's folder, through which files of another place would be read, is a change.
    """
    from nsa.contract import CHECKPOINTS_DIR
    from runbook.engine.intact import doubt
    from runbook.folder.integrity import changed_artifacts
    from runbook.folder.manifest import links_in, load_record

    record = load_record(folder)
    why = doubt(folder, record)
    # Checkpoints, of which no report tells, are large; `verify` reads them too.
    small = (one for one in record.artifacts if CHECKPOINTS_DIR not in Path(one.path).parts)
    doubted = RECORD_FILE if (folder / MANIFEST_FILE).is_file() else MANIFEST_FILE
    changed = [*([doubted] if why else []), *changed_artifacts(folder, small)]
    if changed := [*changed, *links_in(folder)]:
        text = f"runbook: warning: changed since the run: {first_of(changed)}; see runbook verify"
        console.error(text)
    return record, why


def running_line(folder: Path) -> str:
    """What is said of a run that still goes on, and how to look on; empty for any other."""
    from runbook.folder.journal import running_text, watch_line

    text = running_text(folder)
    return f"{folder.name}: {text}; {watch_line(folder)}" if text else ""


def refuse_changed(folder: Path, why: str, what: str) -> None:
    """Raises UsageError with a `doubt` if there is one; `what` follows."""
    if why:
        raise UsageError(
            f"{folder / RECORD_FILE} {why}: {what}",
            hint=f"`runbook verify {folder.name}` names what differs",
        )


def print_reports(console: Console, folder: Path, shown: str = "") -> None:
    """Name the reports that lie in a run's folder, as `shown`: the page first, then the text."""
    for name in ("report.html", "report.md"):
        if (folder / name).is_file():
            console.result(f"report  {shown or folder}/{name}")
