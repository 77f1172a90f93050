"""What is handed over: few files that a person can carry away, whole at any moment."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from runbook.errors import RunbookError
from runbook.files import write_atomic
from runbook.tools.acceptance.stages import Stage
from runbook.tools.acceptance.state import State, Status, read_result

SUMMARY_MD = "summary.md"
SUMMARY_JSON = "summary.json"
TABLES_MD = "tables.md"
RESULTS_JSON = "results.json"
LOG_FILE = "progress.log"
ARCHIVE = "everything.tar.gz"
FILES = (SUMMARY_MD, SUMMARY_JSON, TABLES_MD, RESULTS_JSON, LOG_FILE, ARCHIVE)

STAND_IN = (
    "STAND-IN: no GPU. This is a rehearsal on a CPU with small shapes; it says nothing about a GPU."
)
# Weights and profiler traces are large and say nothing that a table does not.
_LEFT_OUT = (".pt", ".lock", ".tmp", ".pyc")
ARCHIVE_BYTES = 15 << 20
_LARGEST_FILE = 64 << 20


def hand_over(state: State, stages: Sequence[Stage], work: Path, out: Path, again: str) -> None:
    """Write the files of `out`, each replaced at once, so that a cut never leaves half of one.

    `again` is the command that goes on. Raises OSError if the folder refuses.
    """
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob(".*.tmp"):  # of a call that was killed while it wrote
        stale.unlink(missing_ok=True)
    left_out = write_archive(work, out / ARCHIVE)
    if (work / LOG_FILE).is_file():
        write_atomic(out / LOG_FILE, (work / LOG_FILE).read_text("utf-8", errors="replace"))
    results = {stage.name: read_result(work / stage.name) for stage in stages}
    write_atomic(out / RESULTS_JSON, json.dumps(results, indent=2) + "\n")
    write_atomic(out / TABLES_MD, tables_text(state, stages, work))
    document = {
        **state.model_dump(mode="json"),
        "stages": {s.name: state.stages[s.name].model_dump(mode="json") for s in stages},
        "continue": again,
        "left_out": left_out,
    }
    write_atomic(out / SUMMARY_JSON, json.dumps(document, indent=2) + "\n")
    write_atomic(out / SUMMARY_MD, summary_text(state, stages, again, left_out))


def summary_text(
    state: State, stages: Sequence[Stage], again: str, left_out: Sequence[str] = ()
) -> str:
    """The table of the stages, in Markdown."""
    lines = [f"# Acceptance on {state.device}", ""]
    lines += [f"**{STAND_IN}**", ""] if state.stand_in else []
    lines += [
        f"Profile {state.profile}, version {state.tool_version}, begun {state.created_at}.",
        "",
        "| stage | status | seconds | parts | what it says |",
        "|---|---|---:|---:|---|",
    ]
    for stage in stages:
        one = state.stages[stage.name]
        reason = one.reason.replace("|", "\\|").replace("\n", " ")
        time = f"{one.seconds:.0f} of {stage.budget_s * stage.parts:.0f}"
        lines.append(f"| {stage.name} | {one.status} | {time} | {one.parts} | {reason} |")
    open_ones = [s.name for s in stages if not state.stages[s.name].status.finished]
    if open_ones:
        lines += ["", f"To go on with {', '.join(open_ones)}:", "", f"    {again}"]
    else:
        lines += ["", "Every stage has ended."]
    if left_out:
        lines += ["", f"Not in {ARCHIVE}, being too large: {', '.join(left_out)}."]
    return "\n".join(lines) + "\n"


def tables_text(state: State, stages: Sequence[Stage], work: Path) -> str:
    """The tables of all stages one below the other."""
    parts = [f"# Tables of {state.device}\n"]
    parts += [f"**{STAND_IN}**\n"] if state.stand_in else []
    for stage in stages:
        one = state.stages[stage.name]
        if one.status is Status.NOT_RUN:
            continue
        path = work / stage.name / "table.md"
        text = path.read_text("utf-8", errors="replace") if path.is_file() else "(no table)\n"
        parts.append(f"## {stage.name}: {stage.title} ({one.status})\n\n{text}")
    return "\n".join(parts)


def write_archive(work: Path, target: Path, limit: int = ARCHIVE_BYTES) -> list[str]:
    """Pack the work's files, the small ones first, until the archive is full.

    Returns the names of those that did not fit. A file that grows meanwhile goes in as it is.
    """
    packed: list[tuple[int, str, bytes]] = []
    left_out = []
    for path in sorted(work.rglob("*")):
        name = path.relative_to(work).as_posix()
        if not path.is_file() or path.is_symlink() or name.endswith(_LEFT_OUT):
            continue
        try:
            if path.stat().st_size > _LARGEST_FILE:
                left_out.append(name)
                continue
            data = path.read_bytes()
        except OSError:  # it was a temporary one, and is gone
            continue
        packed.append((len(zlib.compress(data, 1)) + 512, name, data))
    room, kept = limit, []
    for size, name, data in sorted(packed, key=lambda item: item[0]):
        if size > room:
            left_out.append(name)
            continue
        room -= size
        kept.append((name, data))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with gzip.open(temporary, "wb", compresslevel=6) as stream:
            _write_tar(stream, sorted(kept))
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return sorted(left_out)


def _write_tar(stream: gzip.GzipFile, files: Sequence[tuple[str, bytes]]) -> None:
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def take_up(out: Path, work: Path) -> bool:
    """Unpack what an earlier call handed over where its work is gone; was there something?

    Files too large for the archive are gone. Raises RunbookError if the archive is damaged.
    """
    archive = out / ARCHIVE
    if not archive.is_file() or (work.exists() and any(work.iterdir())):
        return False
    fresh = work.with_name(f".{work.name}.taken-up")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(fresh, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RunbookError(
            f"{archive} is damaged ({error}): move its folder away to begin anew"
        ) from error
    if work.exists():
        work.rmdir()
    fresh.rename(work)
    return True
