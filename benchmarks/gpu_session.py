"""Everything that only a GPU can answer, in stages: `make gpu`.

    python -m benchmarks.gpu_session [--stage LIST] [--out DIR] [--profile auto] [--until-s S]
        [--again] [--stand-in] [--dry-run]

Each stage starts programs, each in a process group of its own, with one time limit for the stage
and a log for each program. One folder comes back: summary.md and summary.json say how every stage
stands, the stages' folders have the rest. They are written before and after each stage, so that
whatever ends a call, the next one goes on with what is not finished.

Exits with 0 where all stages passed, 1 where one failed, 2 without a GPU, and 3 where one is cut
off, undecided or has not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from benchmarks.program import TO_BE_CONTINUED, markdown_table
from runbook.files import utc_text, write_atomic
from runbook.records import RunRecord

ROOT = Path(__file__).resolve().parents[1]
SUMMARY_JSON, SUMMARY_MD = "summary.json", "summary.md"
NOTICE = "STAND-IN: no GPU. Small shapes on a CPU; it says nothing about a GPU."
_GRACE_S = 30.0
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
# With less time left no stage is begun.
_TOO_LITTLE_S = 20.0
# What a program is told less than its stage has, so that it can end by itself.
_MARGIN_S = 20.0


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
    """Where a stage works: its folder, its profile, and the seconds that its programs are told."""

    folder: Path
    profile: str
    stand_in: bool
    told_s: float


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is started, and the file that gets its output."""

    log: str
    words: Sequence[str]
    needed: bool = True


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


@dataclass(kw_only=True)
class Standing:
    """A stage so far; the seconds are those of all calls together."""

    status: Status = Status.NOT_RUN
    says: str = ""
    seconds: float = 0.0
    parts: int = 0
    commit: str = ""


# -- what the stages start, and what their ends say ------------------------------------------------


def _describe(place: Place) -> list[Program]:
    smi = [] if place.stand_in else [
        Program(log="nvidia_smi.xml", words=("nvidia-smi", "-q", "-x")),
        Program(log="topology.txt", words=("nvidia-smi", "topo", "-m"), needed=False),
    ]  # fmt: skip
    torch = (sys.executable, "-m", "torch.utils.collect_env")
    return [*smi, Program(log="collect_env.txt", words=torch)]


def _tests(place: Place) -> list[Program]:
    if place.stand_in:
        chosen = ["-k", "test_the_comparison_itself", "tests/attention/test_on_a_gpu.py"]
    else:
        chosen = ["-m", "gpu", *files_marked("gpu")]
    junit = f"--junitxml={place.folder / 'junit.xml'}"
    words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", junit, *chosen)
    return [Program(log="pytest.log", words=words)]


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
        asked = ["--profile", place.profile, "--out", str(runs), "--keep-going"]
        asked += ["--phase", "baseline", "--partial-exit", "0"] if place.stand_in else []
    words = (sys.executable, "-m", "runbook", "run", *asked, "--until-s", f"{place.told_s:.0f}")
    return [Program(log="run.log", words=words)]


def _attention(place: Place) -> list[Program]:
    lengths = "1024,2048,4096,8192,16384,32768,65536"
    small = ("--device", "cpu", "--lengths", "256,512", "--rounds", "3")
    shape = small if place.stand_in else ("--lengths", lengths)
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


def judge_tests(place: Place, ends: Sequence[End]) -> tuple[Status, str]:
    """By pytest's own JUnit. What is skipped, or an empty selection, has no answer."""
    junit = place.folder / "junit.xml"
    if not junit.is_file():
        return Status.FAIL, f"exit code {ends[0].code}: {last_line(ends[0].log)}"
    tests = list(ET.parse(junit).getroot().iter("testcase"))
    kinds = {"failed": ("failure", "error"), "skipped": ("skipped",)}
    named = {
        kind: [f"{one.get('classname')}::{one.get('name')}" for one in tests
               if any(one.find(tag) is not None for tag in tags)]
        for kind, tags in kinds.items()
    }  # fmt: skip
    passed = len(tests) - sum(map(len, named.values()))
    text = f"{passed} passed, {len(named['failed'])} failed, {len(named['skipped'])} skipped"
    if named["failed"]:
        return Status.FAIL, f"{text}: {', '.join(named['failed'][:3])}"
    if named["skipped"] or not tests:
        return Status.UNDECIDED, f"{text}, which is not passed"
    code = ends[0].code
    return (Status.PASS, text) if code == 0 else (Status.FAIL, f"{text}, but pytest ended: {code}")


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


# -- a session -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Session:
    """All stages of one device. `until_s` is what this call may take."""

    out: Path
    device: str
    profile: str
    stand_in: bool
    until_s: float | None = None
    standings: dict[str, Standing] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def taken_up(cls, out: Path, *, again: Sequence[str], **given: object) -> Session:
        """As an earlier call left it; the stages of `again` are as if they had not run."""
        session = cls(out=out, **given)  # type: ignore[arg-type]
        path = out / SUMMARY_JSON
        stages = json.loads(path.read_bytes())["stages"] if path.is_file() else {}
        for name, row in stages.items():
            if name in again:
                _set_aside(out / name)
            else:
                session.standings[name] = Standing(**{**row, "status": Status(row["status"])})
        return session

    def run(self, stages: Sequence[Stage]) -> None:
        """Those that are not finished, in their order."""
        for stage in stages:
            standing = self.standings.setdefault(stage.name, Standing())
            limit_s = min(stage.limit_s, self._left_s())
            if standing.status.finished:
                print(f"{stage.name}: {standing.status} already", flush=True)
            elif limit_s < _TOO_LITTLE_S:
                print(f"{stage.name}: not begun, {limit_s:.0f} s are left", flush=True)
            else:
                self._run_stage(stage, standing, limit_s)
        self.write()

    def _left_s(self) -> float:
        gone = time.monotonic() - self.began
        return float("inf") if self.until_s is None else self.until_s - gone

    def _run_stage(self, stage: Stage, standing: Standing, limit_s: float) -> None:
        place = Place(
            folder=self.out / stage.name,
            profile=self.profile,
            stand_in=self.stand_in,
            told_s=limit_s - min(_MARGIN_S, 0.1 * limit_s),
        )
        place.folder.mkdir(parents=True, exist_ok=True)
        # True from now on if nothing else is ever written.
        standing.status, standing.says = Status.CUT_OFF, "this call was ended from outside"
        standing.parts += 1
        standing.commit = _commit()
        self.write()
        print(f"{stage.name}: {stage.title}; at most {limit_s:.0f} s", flush=True)
        begun = time.monotonic()
        ends = list(_ends(stage.programs(place), place.folder, begun + limit_s))
        if any(end.code is None for end in ends):
            status, says = Status.CUT_OFF, f"ended after its {limit_s:.0f} s"
        else:
            status, says = stage.judge(place, ends)
        standing.status, standing.says = status, says
        standing.seconds = round(standing.seconds + time.monotonic() - begun, 1)
        print(f"{stage.name}: {status}: {says}", flush=True)
        self.write()

    @property
    def code(self) -> int:
        """0 all passed, 1 one failed, 3 one has no answer."""
        found = [self.standings.get(stage.name, Standing()).status for stage in STAGES]
        if Status.FAIL in found:
            return 1
        return 0 if all(status is Status.PASS for status in found) else 3

    def write(self) -> None:
        """Both summaries."""
        self.out.mkdir(parents=True, exist_ok=True)
        document = {
            "device": self.device,
            "stand_in": self.stand_in,
            "written_at": utc_text(),
            "stages": {name: asdict(one) for name, one in self.standings.items()},
        }
        write_atomic(self.out / SUMMARY_JSON, json.dumps(document, indent=2) + "\n")
        write_atomic(self.out / SUMMARY_MD, self.page())

    def page(self) -> str:
        """How every stage stands, in Markdown, and what the benchmarks tabulated."""
        rows, tables = [], []
        for stage in STAGES:
            one = self.standings.get(stage.name, Standing())
            rows.append((stage.name, one.status, f"{one.seconds:.0f}", one.parts, one.says))
            path = self.out / stage.name / "table.md"
            if path.is_file():
                tables.append(f"\n## {stage.name}\n\n{path.read_text('utf-8')}")
        notice = f"**{NOTICE}**\n\n" if self.stand_in else ""
        header = ("stage", "status", "seconds", "parts", "what it says")
        text = f"# GPU session on {self.device}\n\n{notice}{markdown_table(header, rows)}"
        return text + "".join(tables)


def _ends(programs: Sequence[Program], folder: Path, until: float) -> Iterator[End]:
    """Start one after the other; after one that was ended from here no other is begun."""
    for program in programs:
        end = started(program, folder, until - time.monotonic())
        if program.needed or end.code == 0:
            yield end
        if end.code is None:
            return


def started(program: Program, folder: Path, limit_s: float) -> End:
    """Run it to its end; a log that is there already goes on. SIGTERM first when time is over."""
    log = folder / program.log
    extends = log.suffix == ".log"
    with log.open("ab" if extends else "wb") as output:
        try:
            child = subprocess.Popen(
                program.words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=ROOT, env={**os.environ, **_ENVIRONMENT}, start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            output.write(f"no program {program.words[0]} on PATH\n".encode())
            return End(code=127, log=log)
        try:
            return End(code=child.wait(max(0.0, limit_s)), log=log)
        except subprocess.TimeoutExpired:
            return End(code=None, log=log)
        finally:
            _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End whatever is left of its process group: what `runbook run` starts, that ends itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def _set_aside(folder: Path) -> None:
    """Keep what an earlier call left beside what the next one makes."""
    if folder.is_dir():
        taken = len(list(folder.parent.glob(f"{folder.name}.earlier-*")))
        folder.rename(folder.with_name(f"{folder.name}.earlier-{taken + 1}"))


def last_line(log: Path) -> str:
    """The last line that is not empty."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "(no output)")


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "no git"


def _device() -> str:
    """The first GPU's name for a folder, with their number where there are several."""
    asked = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise SystemExit(_refused("no nvidia-smi on PATH")) from None
    names = [line.strip() for line in told.stdout.splitlines() if line.strip()]
    if told.returncode or not names:
        raise SystemExit(_refused(f"nvidia-smi lists none: {told.stdout}{told.stderr}".strip()))
    count = f"{len(names)}x-" if len(names) > 1 else ""
    return count + re.sub(r"[^A-Za-z0-9.]+", "-", names[0]).strip("-")


def _refused(why: str) -> int:
    print(f"no GPU: {why}; --stand-in rehearses every stage on the CPU", file=sys.stderr)
    return 2


def chosen(text: str) -> list[Stage]:
    """The stages of a comma-separated list, in their order; all for an empty one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}; there are: {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_session",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    add = parser.add_argument
    add("--stage", type=chosen, default=list(STAGES), metavar="LIST", help="only these")
    add("--out", type=Path, default=ROOT / "artifacts" / "gpu-session", metavar="DIR",
        help="gets a folder named after the device")  # fmt: skip
    add("--profile", default="", metavar="NAME|FILE", help="as for `runbook run` (default: auto)")
    add("--until-s", type=float, metavar="S", help="end this call within S seconds")
    add("--again", action="store_true", help="repeat stages that have ended; their files are kept")
    add("--stand-in", action="store_true", help="a rehearsal on the CPU, marked as such")
    add("--dry-run", action="store_true", help="print the commands and their limits")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _options(words)
    profile = options.profile or ("cpu" if options.stand_in else "auto")
    if options.dry_run:
        for stage in options.stage:
            print(f"# {stage.name}: {stage.title}; at most {stage.limit_s:g} s")
            place = Place(folder=options.out / "DEVICE" / stage.name, profile=profile,
                          stand_in=options.stand_in, told_s=stage.limit_s)  # fmt: skip
            for program in stage.programs(place):
                print(shlex.join(program.words))
        return 0
    device = "STAND-IN" if options.stand_in else _device()
    session = Session.taken_up(
        (options.out / device).resolve(),
        again=[stage.name for stage in options.stage] if options.again else [],
        device=device,
        profile=profile,
        stand_in=options.stand_in,
        until_s=options.until_s,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    session.run(options.stage)
    print(f"\n{session.page()}\nfolder  {session.out}")
    return session.code


if __name__ == "__main__":
    sys.exit(main())
