"""The two lines between a run and whoever started it: what is told, and the request to stop.

What is told is also a line of `runbook run --output-format json`: one event each, with their one
JSON Schema. A request is made by a signal and honoured at the next safe point.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from runbook.records import Check, Launch, LaunchResult, Outcome, PhaseRecord, RunRecord, Verdict
from runbook.records.measurement import Record

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StreamEvent(Record):
    """What every event has: the version of this schema, and when it was told (UTC)."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    schema_version: Literal[1] = 1
    ts: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")


class _OfLaunch(StreamEvent):
    phase: str
    launch: str


class RunStarted(StreamEvent):
    """The run's folder exists; `phases` in the order in which they run."""

    event: Literal["run_started"] = "run_started"
    run_id: str
    run_root: str
    phases: tuple[str, ...]


class PhaseStarted(StreamEvent):
    """The phase's plan is known, nothing of it has run."""

    event: Literal["phase_started"] = "phase_started"
    phase: str
    title: str
    launches: int = Field(ge=0)


class LaunchStarted(_OfLaunch):
    """Processes are being started; `command` can be pasted."""

    event: Literal["launch_started"] = "launch_started"
    attempt: int = Field(ge=1)
    steps: int = Field(ge=0)
    command: str


class LaunchProgress(_OfLaunch):
    """Rank 0 has done `step` of `total` steps; at most two a second, and the last one."""

    event: Literal["launch_progress"] = "launch_progress"
    step: int = Field(ge=0)
    total: int = Field(ge=0)
    toks_per_s: float | None = Field(allow_inf_nan=False)


class SilentRank(Record):
    """A rank that has said nothing for longer than it usually does.

    `usual_s` is its median pause, null if it was heard too seldom; `state` is in words why it
    cannot speak, if the kernel knows.
    """

    rank: int = Field(ge=0)
    silent_s: float = Field(ge=0)
    usual_s: float | None = Field(ge=0)
    state: str


class Pulse(Record):
    """The ranks of a launch now; `wanted` is 0 for one that has no heartbeats.

    `busy` is what the slowest rank is in where that may take long (a `nsa.contract.Phase`), since
    `busy_s`. `silent` begins with the rank that the others wait for.
    """

    alive: int = Field(default=0, ge=0)
    wanted: int = Field(default=0, ge=0)
    busy: str = ""
    busy_s: float = Field(default=0.0, ge=0)
    silent: tuple[SilentRank, ...] = ()


class LaunchRanks(_OfLaunch, Pulse):
    """Whether ranks live, are busy or silent has changed."""

    event: Literal["launch_ranks"] = "launch_ranks"


class Forecast(Record):
    """How far a whole run is: seconds done, and seconds left if anything is known of the rest.

    `share` of the run is done. `unknown` launches are left of which nothing is known, so that more
    than `left_s` is left. `source` says in words what it rests on; `rough` if part of it rests on
    the profile's estimate alone, for an idle machine.
    """

    done_s: float = Field(ge=0)
    share: float = Field(ge=0, le=1)
    left_s: float | None = Field(default=None, ge=0)
    unknown: int = Field(default=0, ge=0)
    source: str = ""
    rough: bool = False


class RunForecast(StreamEvent, Forecast):
    """How far the run is; at most one in ten seconds."""

    event: Literal["run_forecast"] = "run_forecast"


class LaunchFinished(_OfLaunch):
    """Nothing of the launch is alive any more."""

    event: Literal["launch_finished"] = "launch_finished"
    result: LaunchResult


class PhaseFinished(StreamEvent):
    """The phase is judged and written."""

    event: Literal["phase_finished"] = "phase_finished"
    phase: str
    outcome: Outcome
    duration_s: float = Field(ge=0)
    flaky: tuple[str, ...]
    checks: tuple[Check, ...]
    choices: dict[str, str]


class RunFinished(StreamEvent):
    """Everything is written; run.json in `run_root` has the whole record.

    `fingerprint` is run.json's SHA-256: kept elsewhere, `runbook verify --fingerprint` takes it.
    """

    event: Literal["run_finished"] = "run_finished"
    run_id: str
    run_root: str
    fingerprint: str
    verdict: Verdict
    headline: str
    scope: str
    caveats: tuple[str, ...]
    reasons: tuple[str, ...]
    interrupted: bool
    exports: dict[str, str]


class Note(StreamEvent):
    """Something that a person should read."""

    event: Literal["note"] = "note"
    text: str


AnyEvent = Annotated[
    RunStarted
    | PhaseStarted
    | LaunchStarted
    | LaunchProgress
    | LaunchRanks
    | RunForecast
    | LaunchFinished
    | PhaseFinished
    | RunFinished
    | Note,
    Field(discriminator="event"),
]


def events_schema() -> dict[str, Any]:
    """The JSON Schema of one line."""
    return TypeAdapter(AnyEvent).json_schema(mode="serialization")


class Observer:
    """Progress of one run, told in order. An observer decides nothing and must not block.

    This one says nothing; others override the events that they care about.
    """

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None:
        """A run folder exists now."""

    def phase_started(self, name: str, title: str, launches: int) -> None:
        """The phase's plan is known, nothing of it has run."""

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """Processes of this launch are being started; attempts count from 1."""

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        """Rank 0 has done `step` of `total` steps."""

    def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
        """The launch still runs, and this is what its heartbeats say; told twice a second."""

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """Nothing of this launch is alive any more."""

    def run_forecast(self, forecast: Forecast) -> None:
        """How far the run is by now; told at most once a second while a launch runs."""

    def phase_finished(self, record: PhaseRecord) -> None:
        """The phase is judged and written."""

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        """Everything is written."""

    def note(self, text: str) -> None:
        """Something a person should read."""


class Interrupted(BaseException):
    """Raised where waiting for a safe point would take too long; not caught by `Exception`."""


class StopRequest:
    """Set once by a signal, which is only noted unless it comes inside `interruptible()`."""

    def __init__(self) -> None:
        self.requested = ""
        self._raises = False

    def request(self, name: str) -> None:
        """Ask to stop; the first request gives the name."""
        self.requested = self.requested or name

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A section that may take long and leaves nothing half done: a signal raises in it."""
        if self.requested:
            raise Interrupted(self.requested)
        with self._mode(raises=True):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside an interruptible section: a part that looks at `requested` itself."""
        with self._mode(raises=False):
            yield

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.request(signal.Signals(number).name)
        if self._raises:
            raise Interrupted(self.requested)

    @contextmanager
    def _mode(self, *, raises: bool) -> Iterator[None]:
        before, self._raises = self._raises, raises
        try:
            yield
        finally:
            self._raises = before


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[StopRequest]:
    """Route SIGINT, SIGTERM and SIGHUP into `stop`; the handlers of before are put back at the end.

    A terminal that is closed sends SIGHUP, which `nohup` has ignored: then it stays ignored.
    Only possible in the main thread; elsewhere `ValueError` is raised by Python itself.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [one for one in _SIGNALS if not (ignored and one is signal.SIGHUP)]
    before = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
