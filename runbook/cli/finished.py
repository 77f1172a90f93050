"""Finished runs: found by name and read; `report`, `verify`, `judge` and `compare`."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, add_out, add_run, not_in_a_run, path_type
from runbook.console import Console
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit, RunbookError, UsageError, did_you_mean, first_of
from runbook.folder.names import RECORD_FILE

if TYPE_CHECKING:
    from runbook.records import RunRecord

_DEFAULT_FORMAT = "terminal"


def run_folders(out_dir: Path) -> list[Path]:
    """The folders of `out_dir` that hold a run, oldest first (an id begins with its UTC time)."""
    if not out_dir.is_dir():
        return []
    return sorted(
        (folder for folder in out_dir.iterdir() if (folder / RECORD_FILE).is_file()),
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


def load_run(folder: Path) -> RunRecord:
    """Read run.json. Raises RunbookError if it is damaged or of another version."""
    from pydantic import ValidationError

    from runbook.folder.record import load_record

    path = folder / RECORD_FILE
    try:
        return load_record(folder)
    except OSError as error:
        raise RunbookError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise RunbookError(
            f"{path} is not a run record of this version: {place}: {first['msg']}"
            f" ({error.error_count()} problems in total)"
        ) from error


def load_told(folder: Path, console: Console, *, artifacts: bool = False) -> RunRecord:
    """As `load_run`; a warning where run.json, or one of its artifacts, changed since the run.

    A link in the run's folder, through which files of another place would be read, is a change.
    """
    from nsa.contract import CHECKPOINTS_DIR
    from runbook.folder.integrity import changed_artifacts
    from runbook.folder.manifest import links_in, record_is_changed

    record = load_run(folder)
    changed = [RECORD_FILE] if record_is_changed(folder) else []
    if artifacts:
        # Checkpoints, of which no report tells, are large; `verify` reads them too.
        small = (one for one in record.artifacts if CHECKPOINTS_DIR not in Path(one.path).parts)
        changed += [*changed_artifacts(folder, small), *links_in(folder)]
    if changed:
        text = f"runbook: warning: changed since the run: {first_of(changed)}; see runbook verify"
        console.error(text)
    return record


def running_line(folder: Path) -> str:
    """What is said of a run that still goes on, and how to look on; empty for any other."""
    from runbook.folder.ongoing import running_text, watch_line

    text = running_text(folder)
    return f"{folder.name}: {text}; {watch_line(folder)}" if text else ""


def refuse_changed(folder: Path, what: str) -> None:
    """Raises UsageError where run.json is another file than its manifest has; `what` follows."""
    from runbook.folder.manifest import record_is_changed
    from runbook.folder.names import MANIFEST_FILE

    if record_is_changed(folder):
        raise UsageError(
            f"{folder / RECORD_FILE} is another file than its {MANIFEST_FILE} has: {what}",
            hint=f"`runbook verify {folder.name}` names what differs",
        )


def _add_report(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    _add_format(parser, "LIST", "md, details, html, junit, terminal, github, comma-separated")


def _add_format(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    parser.add_argument(
        "--format", default="", metavar=metavar, help=f"{help} (default: {_DEFAULT_FORMAT})"
    )


def _formats(args: argparse.Namespace) -> list[str]:
    chosen = args.format or _DEFAULT_FORMAT
    return list(dict.fromkeys(name.strip() for name in chosen.split(",") if name.strip()))


def _unknown_formats(args: argparse.Namespace) -> list[str]:
    from runbook.engine.outputs import format_problems

    if args.json and args.format:
        return ["--json and --format: choose one"]
    if not _formats(args):
        return ["--format names no format"]
    if "json" in _formats(args):
        return ["--format json: there is none; --json prints run.json, the record"]
    return [f"--format {text}" for text in format_problems(_formats(args))]


def _one_known_format(args: argparse.Namespace) -> list[str]:
    several = len(_formats(args)) > 1
    return ["--format takes one format here"] if several else _unknown_formats(args)


def print_reports(console: Console, folder: Path, shown: str = "") -> None:
    """Name the reports that lie in a run's folder, as `shown`: the page first, then the text."""
    for name in ("report.html", "report.md"):
        if (folder / name).is_file():
            console.result(f"report  {shown or folder}/{name}")


def _print(console: Console, record: RunRecord, fmt: str, *, as_json: bool) -> None:
    from runbook.engine.outputs import render
    from runbook.files import typed_here
    from runbook.folder.record import record_text
    from runbook.records.run import Screen

    screen = Screen(color=console.color_out, width=console.width_out, program=typed_here())
    console.page(record_text(record) if as_json else render(record, fmt, screen))


def _report(args: argparse.Namespace, console: Console) -> int:
    """Print one format, or write several. The exit code says nothing of a verdict that stands."""
    from runbook.engine.outputs import write_reports
    from runbook.folder.integrity import untrusted
    from runbook.folder.manifest import record_is_changed

    folder = find_run(args.run_name, args.out)
    formats = _formats(args)
    running = running_line(folder)
    if running and formats == [_DEFAULT_FORMAT]:
        console.result(running)
        return ProgramExit.INCOMPLETE
    if running:
        console.error(running)
    if len(formats) > 1:
        refuse_changed(folder, "its reports are kept; one --format goes to stdout")
    record = load_told(folder, console, artifacts=True)
    changed = record_is_changed(folder)
    record = untrusted(record) if changed else record
    if len(formats) == 1:
        _print(console, record, formats[0], as_json=args.json)
        if formats == [_DEFAULT_FORMAT] and not args.json:
            print_reports(console, folder)
    else:
        for path in write_reports(record, folder, formats):
            console.result(str(path))
    return ProgramExit.INCOMPLETE if changed or running else ProgramExit.GO


REPORT = Command(
    name="report",
    help="render a run's report again",
    description="""\
Render a run again from its run.json. One format goes to stdout; several are written
into the run's folder, and their paths go to stdout.""",
    examples="""\
  runbook report                                the newest run, on the terminal
  runbook report --format md > report.md
  runbook report 20261121T010203Z-840303b --format md,html,junit""",
    exits="0 whatever the verdict, 2 usage, 3 the run still goes on, or run.json changed since",
    json_help="the record: run.json as it is",
    add_arguments=_add_report,
    problems=_unknown_formats,
    run=_report,
)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--fingerprint",
        default="",
        metavar="DIGITS",
        help="what the run printed at its end, kept elsewhere: the record has to be that one, so "
        "that a forgery of all files is seen (default: the folder is held against itself only)",
    )


def _fingerprint_problems(args: argparse.Namespace) -> list[str]:
    from runbook.folder.record import FINGERPRINT_DIGITS

    told = args.fingerprint
    if not told or re.fullmatch(rf"[0-9a-fA-F]{{{FINGERPRINT_DIGITS},64}}", told):
        return []
    wanted = f"{FINGERPRINT_DIGITS} to 64 digits (0-9, a-f)"
    return [f"--fingerprint {told!r} is not a fingerprint; allowed: {wanted}, as printed"]


def _verify(args: argparse.Namespace, console: Console) -> int:
    from runbook.engine.verify import verify_run
    from runbook.folder.record import shown_fingerprint

    folder = find_run(args.run_name, args.out)
    if running := running_line(folder):
        if args.json:
            console.json_document({"schema_version": 1, "ok": False, "running": running})
        else:
            console.result(f"{running}; nothing to verify yet")
        return ProgramExit.INCOMPLETE
    found = verify_run(folder, fingerprint=args.fingerprint)
    code = ProgramExit.GO if found.ok else ProgramExit.NO_GO
    if args.json:
        console.json_document({"schema_version": 1, "ok": found.ok, **dataclasses.asdict(found)})
        return code
    for difference in found.differences:
        console.result(f"DIFFERS  {difference}")
    if found.note:
        console.result(f"note  {found.note}")
    checked = (
        f"{found.files} files, {found.checks} checks, {found.measurements} measurements, "
        f"{len(found.reports)} reports"
    )
    if found.ok:
        console.result(f"verified {found.run_id}: {checked}; nothing differs")
        held = "the one asked for" if args.fingerprint else "hold it against the one kept elsewhere"
        console.result(f"fingerprint  {shown_fingerprint(found.fingerprint)} ({held})")
    else:
        count = len(found.differences)
        differ = "1 difference" if count == 1 else f"{count} differences"
        console.result(f"NOT VERIFIED {found.run_id}: {differ} ({checked})")
    return code


VERIFY = Command(
    name="verify",
    help="recompute every number of a run from its artifacts",
    description="""\
Read and judge a finished run again and compare: the digest of every file, run.json
against its journal, every check and measurement against the artifacts, every report
against a fresh rendering. Changes nothing.""",
    examples="""\
  runbook verify                              the newest run
  runbook verify artifacts/20261121T010203Z-840303b
  runbook verify RUN --fingerprint DIGITS     it is the record that the run ended with""",
    exits="0 nothing differs, 1 something does (each difference is named), 2 usage,\n"
    "3 the run still goes on",
    add_arguments=_add_verify,
    problems=_fingerprint_problems,
    run=_verify,
)


def _add_judge(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--profile",
        default="",
        metavar="NAME|FILE",
        help="the limits to judge by (default: those of the run)",
    )
    _add_format(parser, "FORMAT", "md, details, html, junit, terminal or github")


def _judge(args: argparse.Namespace, console: Console) -> int:
    from runbook.config import load_profile, load_profile_document
    from runbook.engine.verify import judge_again
    from runbook.folder.integrity import untrusted
    from runbook.folder.manifest import record_is_changed

    folder = find_run(args.run_name, args.out)
    record = load_told(folder, console, artifacts=True)
    if args.profile:
        profile = load_profile(args.profile)
    else:
        profile = load_profile_document(record.profile_document, where=RECORD_FILE)
    judged = judge_again(record, folder, profile, named=args.profile)
    judged = untrusted(judged) if record_is_changed(folder) else judged
    _print(console, judged, _formats(args)[0], as_json=args.json)
    return judged.verdict.exit_code


JUDGE = Command(
    name="judge",
    help="judge a finished run again under other limits",
    description="""\
Judge the artifacts of a finished run by the limits of another profile. Starts
nothing and changes nothing; the report goes to stdout.""",
    examples="""\
  runbook judge --profile a100x2_pcie3
  runbook judge 20261121T010203Z-840303b --profile mine.yaml --format md""",
    exits="0 GO, 1 NO-GO, 2 usage, 3 INCOMPLETE, 4 PARTIAL PASS",
    json_help="the record as judged now, in the form of run.json",
    add_arguments=_add_judge,
    problems=_one_known_format,
    run=_judge,
)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", metavar="A", nargs="?", help="the reference: a run's folder or id (no default)"
    )
    parser.add_argument("b", metavar="B", nargs="?", help="the run to judge (no default)")
    add_out(parser)
    parser.add_argument(
        "--html",
        type=path_type,
        metavar="FILE",
        help="write the two side by side as a page, too (default: no page)",
    )


def _compare_problems(args: argparse.Namespace) -> list[str]:
    if args.b is None:
        names = ", ".join(folder.name for folder in run_folders(args.out)[-5:]) or "none"
        return [f"name the two runs to compare; in {args.out}/ there are: {names}"]
    page = args.html
    if page is None:
        return []
    if page.is_dir() or not page.parent.is_dir():
        return [f"--html {page}: name a file in a folder that is there"]
    return not_in_a_run("--html", page)


def _compare(args: argparse.Namespace, console: Console) -> int:
    from runbook.tools.compare import Comparison, compare_runs, comparison_text

    first, second = (find_run(name, args.out) for name in (args.a, args.b))
    a, b = (load_told(folder, console) for folder in (first, second))
    found = compare_runs(a, first, b, second)
    if args.html is not None:
        from runbook import registry
        from runbook.files import write_atomic, written_to

        with written_to("--html", args.html):
            write_atomic(args.html, registry.page("compare", Comparison)(found))
        console.progress(f"page  {args.html}")
    if args.json:
        console.json_document(found.document())
    else:
        console.page(comparison_text(found))
    return found.exit_code


COMPARE = Command(
    name="compare",
    help="compare two finished runs: are they comparable, and what changed",
    description="""\
Compare run B with the reference A. Numbers are compared only if the work is the
same and one thing differs: code, software, machine or toggles. Only what both ran is
compared; a loss of speed is shown where its 99 % bound is beyond what two runs at
different times differ by (5 % on GPUs, 50 % on shared cores).""",
    examples="""\
  runbook compare 20261120T010203Z-840303b 20261121T010203Z-aa84eda
  runbook compare artifacts/20261120T010203Z-840303b 20261121 --html both.html""",
    exits="0 nothing worse, 1 worse, 2 usage, 3 not comparable or undecided",
    add_arguments=_add_compare,
    problems=_compare_problems,
    run=_compare,
)
