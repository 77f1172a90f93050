"""The stages of a session: what each starts, and what the ends of its programs say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.program import TO_BE_CONTINUED
from runbook.folder.launch.documents import read_junit
from runbook.records import RunRecord

ROOT = Path(__file__).resolve().parents[2]
# A test of so many seconds hangs.
_HANGS_S = 120


class Status(StrEnum):
    """How a stage stands."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"
    CUT_OFF = "CUT OFF"
    NOT_RUN = "NOT RUN"

    @property
    def finished(self) -> bool:
        """Nothing of it is left to do."""
        return self in (Status.PASS, Status.FAIL, Status.UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a stage works: its folder, and the seconds that its programs are told."""

    folder: Path
    stand_in: bool
    told_s: float


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is started, and the file that gets its output."""

    log: str
    words: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class End:
    """How a program ended; without a code it was ended from here."""

    code: int | None
    log: Path


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a session. `judge` is asked where all programs came to an end by themselves."""

    name: str
    title: str
    limit_s: float
    programs: Callable[[Place], Sequence[Program]]
    judge: Callable[[Place, Sequence[End]], tuple[Status, str]]


def _describe(place: Place) -> list[Program]:
    torch = (sys.executable, "-m", "torch.utils.collect_env")
    asked = [Program(log="collect_env.txt", words=torch)]
    if not place.stand_in:
        asked.append(Program(log="nvidia_smi.xml", words=("nvidia-smi", "-q", "-x")))
    return asked


def _tests(place: Place) -> list[Program]:
    # A file each: what failed in one is told, and its answer kept, however the next one ends.
    files = files_marked("gpu")
    chosen = ["-m", "gpu"]
    if place.stand_in:
        files, chosen = ["tests/attention/test_proofs.py"], ["-k", "test_g_overlap_weights"]
    pytest = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *chosen)
    # A hang says where it hangs, and takes the time of its own file alone.
    limits = ("-o", f"faulthandler_timeout={_HANGS_S}", "-o", "faulthandler_exit_on_timeout=true")
    names = [file.removesuffix(".py").replace("/", ".") for file in files]
    return [
        Program(log=f"{name}.log",
                words=(*pytest, *limits, f"--junitxml={place.folder / name}.xml", file))
        for name, file in zip(names, files, strict=True)
    ]  # fmt: skip


def files_marked(mark: str) -> list[str]:
    """The test files that name a marker: others need not be imported, where a package may lack."""
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "nsa/tests")
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if re.search(rf"mark\.{mark}\b", path.read_text("utf-8"))
    ]
    if not found:
        raise SystemExit(f"no test is marked with {mark}")
    return found


def _run(place: Place) -> list[Program]:
    runs = place.folder / "runs"
    begun = sorted(runs.glob("*/events.jsonl"))
    if begun:
        asked = ["--resume", str(begun[-1].parent)]
    else:
        small = ("--profile", "cpu", "--phase", "baseline", "--partial-exit", "0")
        profile = small if place.stand_in else ("--profile", "auto")
        asked = [*profile, "--out", str(runs), "--keep-going"]
    limit = ("timeout", "--foreground", "--preserve-status", f"{place.told_s:.0f}")
    words = (*limit, sys.executable, "-m", "runbook", "run", *asked)
    return [Program(log="run.log", words=words)]


def _attention(place: Place) -> list[Program]:
    lengths = "1024,2048,4096,8192,16384,32768,65536"
    small = ("--device", "cpu", "--lengths", "256,512", "--rounds", "3")
    shape = small if place.stand_in else ("--lengths", lengths, "--shapes", "12/2/64,64/4/128")
    told = ("--out", str(place.folder), "--left-s", f"{place.told_s:.0f}")
    words = (sys.executable, "-m", "benchmarks.attention_gpu", *told, *shape)
    return [Program(log="attention.log", words=words)]


def _step(place: Place) -> list[Program]:
    small = ("--lengths", "256", "--layers", "2") if place.stand_in else ("--operators", "12")
    words = (sys.executable, "-m", "benchmarks.step_calls", *small)
    return [Program(log="step.md", words=words)]


def by_code(place: Place, ends: Sequence[End]) -> tuple[Status, str]:
    """0 passed, 75 to be continued, anything else failed; a benchmark says more in result.json."""
    codes = [end.code for end in ends]
    result = place.folder / "result.json"
    said = json.loads(result.read_bytes())["summary"] if result.is_file() else ""
    if TO_BE_CONTINUED in codes:
        return Status.CUT_OFF, said or "out of time"
    bad = next((end for end in ends if end.code != 0), None)
    if bad is not None:
        return Status.FAIL, said or f"{bad.log.name}, exit code {bad.code}: {last_line(bad.log)}"
    return Status.PASS, said or last_line(ends[-1].log)


def judge_tests(_place: Place, ends: Sequence[End]) -> tuple[Status, str]:
    """By pytest's own JUnit files. What is skipped, or an empty selection, has no answer."""
    named: dict[str, list[str]] = {"passed": [], "failed": [], "error": [], "skipped": []}
    broken, empty = [], False
    for end in ends:
        report = read_junit(end.log.with_suffix(".xml"), name=end.log.stem, problems=[])
        cases = [] if report is None else report.cases
        for case in cases:
            named[case.status].append(f"{case.classname}::{case.name}")
        bad = any(case.status in ("failed", "error") for case in cases)
        if report is None or (end.code and not bad):
            broken.append(f"{end.log.name}, exit code {end.code}: {last_line(end.log)}")
        empty = empty or not cases
    failed = named["failed"] + named["error"]
    text = f"{len(named['passed'])} passed, {len(failed)} failed, {len(named['skipped'])} skipped"
    if failed or broken:
        return Status.FAIL, f"{text}: {', '.join(broken + failed[:3])}"
    if named["skipped"] or empty:
        return Status.UNDECIDED, f"{text}, which is not passed"
    return Status.PASS, text


def judge_run(place: Place, ends: Sequence[End]) -> tuple[Status, str]:
    """By the run's own record; one that was ended in the middle goes on in the next part."""
    record = max(place.folder.glob("runs/*/run.json"), default=None)
    if record is None:
        return Status.FAIL, f"exit code {ends[0].code}: {last_line(ends[0].log)}"
    run = RunRecord.model_validate_json(record.read_bytes())
    if run.interrupted or run.finished_at is None:
        return Status.CUT_OFF, f"{run.run_id} goes on"
    known = {0: Status.PASS, 1: Status.FAIL, 3: Status.UNDECIDED}
    return known.get(ends[0].code or 0, Status.FAIL), run.headline


def last_line(log: Path) -> str:
    """The last line that is not empty."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "(no output)")


STAGES = (
    Stage(
        name="device", title="what the machine is", limit_s=60, programs=_describe, judge=by_code
    ),
    Stage(
        name="tests", title="the tests that need a device; one skipped is not passed",
        limit_s=300, programs=_tests, judge=judge_tests,
    ),
    Stage(
        name="attention", title="attention beside dense kernels, and the time of each of ours",
        limit_s=180, programs=_attention, judge=by_code,
    ),
    Stage(
        name="step", title="what a step costs its host: the calls, by operator",
        limit_s=180, programs=_step, judge=by_code,
    ),
    Stage(
        name="run", title="one run of the profile, in parts, with its verdict",
        limit_s=3600, programs=_run, judge=judge_run,
    ),
)  # fmt: skip
