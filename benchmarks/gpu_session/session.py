"""A session: the stages of one device, each run to its end or cut off, and how they stand."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.gpu_session.stages import ROOT, End, Place, Program, Stage, Status
from benchmarks.program import markdown_table
from runbook.files import utc_text, write_atomic
from runbook.machine.git import commit_of
from runbook.process import end_kept, spawn_kept

SUMMARY_JSON, SUMMARY_MD = "summary.json", "summary.md"
NOTICE = "STAND-IN: no GPU. Small shapes on a CPU; it says nothing about a GPU."
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
# With less time left no stage is begun.
_TOO_LITTLE_S = 20.0
# What a program is told less than its stage has, so that it can end by itself.
_MARGIN_S = 20.0


@dataclass(kw_only=True)
class Standing:
    """A stage so far; the seconds are those of all calls together."""

    status: Status = Status.NOT_RUN
    says: str = ""
    seconds: float = 0.0
    parts: int = 0
    commit: str = ""


@dataclass(kw_only=True)
class Session:
    """All stages of one device. `until_s` is what this call may take."""

    out: Path
    device: str
    stand_in: bool
    stages: Sequence[Stage]
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
            stand_in=self.stand_in,
            told_s=limit_s - min(_MARGIN_S, 0.1 * limit_s),
        )
        place.folder.mkdir(parents=True, exist_ok=True)
        # True from now on if nothing else is ever written.
        standing.status, standing.says = Status.CUT_OFF, "this call was ended from outside"
        standing.parts += 1
        standing.commit = commit_of(ROOT) or "no git"
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
        found = [self.standings.get(stage.name, Standing()).status for stage in self.stages]
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
        for stage in self.stages:
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
        yield end
        if end.code is None:
            return


def started(program: Program, folder: Path, limit_s: float) -> End:
    """Run it to its end, or end it and all that it started; a log that is there goes on."""
    log = folder / program.log
    environment = {**os.environ, **_ENVIRONMENT}
    with log.open("ab" if log.suffix == ".log" else "wb") as output:
        child = spawn_kept(program.words, environment, output=output, cwd=ROOT)
        try:
            return End(code=child.wait(max(0.0, limit_s)), log=log)
        except subprocess.TimeoutExpired:
            return End(code=None, log=log)
        finally:
            end_kept(child)


def _set_aside(folder: Path) -> None:
    """Keep what an earlier call left beside what the next one makes."""
    if folder.is_dir():
        taken = len(list(folder.parent.glob(f"{folder.name}.earlier-*")))
        folder.rename(folder.with_name(f"{folder.name}.earlier-{taken + 1}"))
