"""Runs stages one after the other, each within its time, and writes down everything as it goes."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from nsa.contract import RUN_TOKEN_VARIABLE, is_secret_name
from runbook.errors import UsageError
from runbook.files import utc_text
from runbook.launch import StopRequest, set_aside
from runbook.machine import git
from runbook.process.guard import Reaper
from runbook.process.reaper import carriers, kill_all, signal_owned
from runbook.process.start import spawn
from runbook.read.documents import CONSOLE_LOG, LAUNCH_JSON
from runbook.tools.acceptance.handover import LOG_FILE, hand_over
from runbook.tools.acceptance.stages import TO_BE_CONTINUED, Place, Stage, StageCommand
from runbook.tools.acceptance.state import CommandEnd, State, Status, read_result

_POLL_S = 0.1
_TELL_EVERY_S = 30.0
_HAND_OVER_EVERY_S = 60.0
_TERM_GRACE_S = 15.0
# What a program gets less than its stage, so that it can end by itself and write what it has.
_MARGIN_SHARE, _MARGIN_S = 0.1, 20.0
_STATUS = {0: Status.PASS, 1: Status.FAIL, 3: Status.UNDECIDED, TO_BE_CONTINUED: Status.CUT_OFF}
_LAST_BYTES = 4096


@dataclass(kw_only=True)
class Runner:
    """One call. `until_s` is what it may take in all; `again` is the command that goes on.

    `tell` gets every line of progress, which also goes into the log.
    """

    stages: Sequence[Stage]
    place: Place
    state: State
    work: Path
    out: Path
    again: str
    tell: Callable[[str], None]
    stop: StopRequest
    until_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    problem: str = ""

    def run(self, asked: Sequence[Stage]) -> State:
        """Run what is not finished of these stages; everything is handed over at the end.

        Raises OSError only if the work's own folder refuses; one that is to be handed over and
        does is told, and `problem` says so.
        """
        for stage in asked:
            if self.stop.requested:
                break
            if self.state.stages[stage.name].status.finished:
                self._say(f"{stage.name}: {self.state.stages[stage.name].status} already")
                continue
            self._run_parts(stage)
            self._hand_over()
        self._hand_over()
        return self.state

    def set_aside(self, stage: Stage) -> None:
        """Forget a stage's end, so that it runs again; its files stay beside the new ones."""
        folder = self.work / stage.name
        if folder.is_dir():
            set_aside(folder, "earlier")
        self._keep(stage, status=Status.NOT_RUN, reason="to be repeated", seconds=0.0, parts=0,
                   commands=())  # fmt: skip

    def _run_parts(self, stage: Stage) -> None:
        missing = self.place.missing(stage)
        if missing:
            self._keep(stage, status=Status.NOT_RUN, reason="; ".join(missing))
            self._say(f"{stage.name}: NOT RUN: {'; '.join(missing)}")
            return
        for _ in range(stage.parts):
            left_s = self._left_s()
            if left_s < stage.least_s:
                text = f"{left_s:.0f} s were left of this call, it needs {stage.least_s:.0f}"
                if not self.state.stages[stage.name].parts:
                    self._keep(stage, status=Status.NOT_RUN, reason=text)
                self._say(f"{stage.name}: not started: {text}")
                return
            self._run_part(stage, min(stage.budget_s, left_s))
            if self.state.stages[stage.name].status.finished or self.stop.requested:
                return
            self._hand_over()

    def _left_s(self) -> float:
        if self.until_s is None:
            return float("inf")
        return self.until_s - (time.monotonic() - self.began)

    def _run_part(self, stage: Stage, limit_s: float) -> None:
        before = self.state.stages[stage.name]
        folder = self.work / stage.name
        folder.mkdir(parents=True, exist_ok=True)
        self._keep(
            stage,
            # True from now on if nothing else is ever written.
            status=Status.CUT_OFF,
            reason="it was running when this was written, and was ended from outside",
            started_at=before.started_at or utc_text(),
            parts=before.parts + 1,
            commit=self._commit(),
        )
        self._hand_over()
        self._say(f"{stage.name}: {stage.title}; part {before.parts + 1}, at most {limit_s:.0f} s")
        clock = _Clock(limit_s=limit_s, before_s=before.seconds)
        done = {end.name for end in before.commands}
        status, reason = Status.PASS, ""
        for command in stage.commands:
            if command.name in done:
                continue
            code = self._command(stage, command, folder, clock)
            reached, text = _meaning(code, command, folder, clock, self.stop.requested)
            if reached is not Status.CUT_OFF:
                end = CommandEnd(name=command.name, code=code or 0, seconds=clock.gone_s)
                ends = (*self.state.stages[stage.name].commands, end)
                self._keep(stage, commands=ends)
            if _severity(reached) >= _severity(status):
                status, reason = reached, text
            if status is Status.CUT_OFF:
                break
        # A command that failed in an earlier part still counts.
        if status is Status.PASS and any(e.code for e in self.state.stages[stage.name].commands):
            worst = max((e.code for e in self.state.stages[stage.name].commands), default=0)
            status, reason = _STATUS.get(worst, Status.FAIL), reason or "an earlier command failed"
        self._keep(stage, status=status, reason=reason, seconds=clock.all_s)
        self._say(f"{stage.name}: {status} after {clock.gone_s:.0f} s: {reason}")

    def _command(
        self, stage: Stage, command: StageCommand, folder: Path, clock: _Clock
    ) -> int | None:
        """The exit code; None if it was ended from here."""
        margin = min(_MARGIN_S, _MARGIN_SHARE * clock.left_s)
        values = self.place.values(folder.resolve(), max(1.0, clock.left_s - margin))
        words = command.words(values, stand_in=self.place.stand_in)
        token = secrets.token_hex(16)
        environment = {k: v for k, v in os.environ.items() if not is_secret_name(k)}
        package = str(Path(__file__).resolve().parents[3])
        paths = (package, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
        environment |= {
            RUN_TOKEN_VARIABLE: token,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        console = folder / CONSOLE_LOG
        with Reaper(token), console.open("ab") as output:
            child = spawn(words, environment, output=output, cwd=self.place.checkout)
            try:
                return self._wait(stage, child, console, clock, token)
            finally:
                kill_all(token)
                child.wait()
                _end_launches(folder)

    def _wait(
        self,
        stage: Stage,
        child: subprocess.Popen[bytes],
        console: Path,
        clock: _Clock,
        token: str,
    ) -> int | None:
        told = handed = time.monotonic()
        while child.poll() is None:
            now = time.monotonic()
            if clock.left_s <= 0 or self.stop.requested:
                signal_owned(child.pid, token, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_TERM_GRACE_S)
                return TO_BE_CONTINUED if child.returncode == TO_BE_CONTINUED else None
            if now - told >= _TELL_EVERY_S:
                told = now
                self._say(f"{stage.name}: {clock}: {_last_line(console)}")
            if now - handed >= _HAND_OVER_EVERY_S:
                handed = now
                self._keep(stage, seconds=clock.all_s)
                self._hand_over()
            time.sleep(_POLL_S)
        return child.returncode

    def _keep(self, stage: Stage, **changes: object) -> None:
        self.state = self.state.with_stage(stage.name, **changes)
        self.state.write(self.work)

    def _say(self, text: str) -> None:
        gone = time.monotonic() - self.began
        line = f"[{gone:5.0f} s] {'STAND-IN, no GPU: ' if self.place.stand_in else ''}{text}"
        self.tell(line)
        with (self.work / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(f"{utc_text()} {line}\n")

    def _hand_over(self) -> None:
        try:
            hand_over(self.state, self.stages, self.work, self.out, self.again)
        except OSError as error:
            what = f"{error.filename or self.out}: {error.strerror or error}"
            if what != self.problem:
                self._say(f"cannot be handed over: {what}; everything is kept in {self.work}")
            self.problem = what
        else:
            self.problem = ""

    def _commit(self) -> str:
        checkout = git.find_checkout()
        return (git.head_sha(checkout) if checkout else None) or "no git"


@dataclass(kw_only=True)
class _Clock:
    """The time of one part, on top of the `before_s` of earlier ones."""

    limit_s: float
    before_s: float
    began: float = field(default_factory=time.monotonic)

    @property
    def gone_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        return self.limit_s - self.gone_s

    @property
    def all_s(self) -> float:
        return round(self.before_s + self.gone_s, 1)

    def __str__(self) -> str:
        return f"{self.gone_s:.0f} of {self.limit_s:.0f} s"


def _meaning(
    code: int | None, command: StageCommand, folder: Path, clock: _Clock, stopped: str
) -> tuple[Status, str]:
    """What a command's end says, in a word and in a sentence."""
    said = str(read_result(folder).get("summary", ""))
    if code is None:
        why = f"ended by {stopped}" if stopped else f"ended after its {clock.limit_s:.0f} s"
        return Status.CUT_OFF, f"{command.name} {why}{f'; so far: {said}' if said else ''}"
    if code == TO_BE_CONTINUED:
        return Status.CUT_OFF, f"out of time, to be continued; so far: {said or 'nothing'}"
    if code in _STATUS:
        return _STATUS[code], said or f"{command.name}: {_last_line(folder / CONSOLE_LOG)}"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Status.FAIL, f"{command.name} {how}: {_last_line(folder / CONSOLE_LOG)}"


def _severity(status: Status) -> int:
    return (Status.PASS, Status.UNDECIDED, Status.FAIL, Status.CUT_OFF).index(status)


def _last_line(console: Path) -> str:
    """The last line that is not empty of what a stage printed."""
    try:
        with console.open("rb") as stream:
            stream.seek(max(0, console.stat().st_size - _LAST_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return "(no output)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(no output)"


def _end_launches(folder: Path) -> None:
    """End what launches of the stage's program left, if that program was killed.

    Their own reapers do the same; here it is waited for.
    """
    for path in folder.rglob(LAUNCH_JSON):
        try:
            token = str(json.loads(path.read_bytes()).get("run_token", ""))
        except (OSError, ValueError):
            continue
        if token and carriers(token):
            kill_all(token)


@contextmanager
def only_one(work: Path) -> Iterator[None]:
    """Hold the work's folder for this process. Raises UsageError if another one has it."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "only_one.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{work}: another acceptance is running there", hint="wait for it, or name --work"
            ) from error
        yield
