"""Two small phases over the fake trainer, and a profile that requires their checks.

Also a program: `python -m tests.engine.toys run OUT [FAULT]` and `... resume RUN`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from runbook.config import Profile
from runbook.config.load import load_profile
from runbook.config.registry import Judgement, Phase, PlanContext
from runbook.config.settings import Settings
from runbook.config.setup import RunOptions, Setup
from runbook.engine.resuming import resume_run
from runbook.engine.run import run_setup
from runbook.engine.verify import Verification, verify_run
from runbook.launch.observer import Observer, StopRequest, stop_on_signals
from runbook.records import ArmSchedule, Launch, LaunchStatus, Outcome, Reason, RunRecord, Table
from runbook.records.evidence import PhaseEvidence, TrainingLog
from runbook.stats.throughput import effective, last_window
from tests.factory.records import check
from tests.launch.helpers import fake_launch

CUT = (LaunchStatus.INTERRUPTED, LaunchStatus.PREEMPTED, LaunchStatus.NOT_RUN)


class Toy(Phase):
    """Launches `count` fake trainers; passes if all completed and the rate could be read."""

    source, question = "a test", "does it run?"
    count, steps, breaks, forgets, planned = 1, 5, "", False, 0
    words: tuple[str, ...] = ()
    schedule: ArmSchedule | None = None

    def __init__(self, name: str, **told: Any) -> None:
        self.name, self.title = name, name.title()  # type: ignore[misc]
        for attribute, value in told.items():
            assert hasattr(self, attribute), attribute
            setattr(self, attribute, value)

    def plan(self, context: PlanContext) -> list[Launch]:
        self.planned += 1
        if self.breaks == "plan" and self.planned > 1:  # what cannot be planned at all never runs
            raise RuntimeError("planted in plan")
        return [
            fake_launch(
                *self.words, name=f"run{i}", steps=self.steps, schedule=self.schedule,
                env=dict(context.choices),
            ).model_copy(update={"phase": self.name, "run_dir": f"{self.name}/run{i}"})
            for i in range(1, self.count + 1)
        ]  # fmt: skip

    def check_ids(self, context: PlanContext) -> tuple[str, ...]:
        return (f"{self.name}.completed", f"{self.name}.rate")

    def judge(self, evidence: PhaseEvidence, context: PlanContext) -> Judgement:
        if self.breaks == "judge":
            raise RuntimeError("planted in judge")
        cut = [e for e in evidence.launches.values() if e.result.status in CUT]
        bad = [e for e in evidence.launches.values() if not e.result.ok]
        outcome, code = (Outcome.PASS, Reason.OK) if not bad else (Outcome.FAIL, Reason.CRASH)
        if cut:
            outcome, code = Outcome.INCOMPLETE, Reason.INTERRUPTED
        done = {"reason": bad[0].result.cause, "remedy": "mend it"} if bad else {}
        checks = [check(f"{self.name}.completed", outcome, code, **done)]
        logs = {name: one.training for name, one in evidence.launches.items() if one.training}
        logs = {name: log for name, log in logs.items() if len(log.frame) >= 3}
        rates = [last_window(log, n=min(3, self.steps)) for log in logs.values()]
        if not self.forgets:
            held = {"limit": context.profile.limits["throughput"].value, "limit_source": "a test"}
            rate = {"measurement": rates[0], **held} if rates else {}
            missing = (Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT)
            checks.append(check(f"{self.name}.rate", *(() if rates else missing), **rate))
        rows = tuple((name, float(effective(log).value)) for name, log in logs.items())
        return Judgement(
            checks=checks,
            measurements=rates,
            tables=(Table(title="Rates", columns=("launch", "tok/s"), rows=rows),),
            choices={"NSA_DDP_BUCKET_MB": "25"} if self.name == "baseline" else {},
        )

    def enough(self, log: TrainingLog, launch: Launch, context: PlanContext) -> bool:
        return len(log.frame) >= 8


PHASES = {
    "baseline": Toy("baseline", count=2),
    "bucket_sweep": Toy("bucket_sweep", reads=("baseline",)),
}


def profile(phases: tuple[Phase, ...]) -> Profile:
    """The CPU profile, requiring the toys' checks only."""
    shipped = load_profile("cpu")
    required = tuple(f"{phase.name}.{what}" for phase in phases for what in ("completed", "rate"))
    return shipped.model_copy(update={"required": required, "name": "toy"})


def setup(out: Path, *phases: Phase, whole: tuple[Phase, ...] = (), **changed: Any) -> Setup:
    """A setup as `prepare` would give it; `whole` are those whose checks the profile requires."""
    names = ",".join(phase.name for phase in phases)
    given = {"profile": "toy", "phases": names, "retry": False} | changed
    options = RunOptions(out=out, command="toy", **given)
    required = profile(whole or phases)
    return Setup(options=options, profile=required, settings=Settings(), phases=phases)


def run(
    out: Path, *phases: Phase, observer: Observer | None = None, **changed: Any
) -> tuple[RunRecord, Path]:
    """Run the phases; the record and the run's folder. `changed` are options."""
    asked = setup(out, *phases, **changed)
    with stop_on_signals(StopRequest()) as stop:
        record = run_setup(asked, observer=observer or Observer(), stop=stop)
    return record, out / record.run_id


def resume(folder: Path, *phases: Phase, **how: Any) -> RunRecord:
    """Go on with a run for which these phases are required, with those that it was asked for."""

    def make(record: RunRecord) -> Setup:
        names = str(record.options["phases"]).split(",")
        asked = (phase for phase in phases if phase.name in names)
        return setup(folder.parent, *asked, whole=phases)

    with setups_by(make), stop_on_signals(StopRequest()) as stop:
        return resume_run(folder, **{"observer": Observer(), "stop": stop} | how)


@contextmanager
def setups_by(make: Callable[[RunRecord], Setup]) -> Iterator[None]:
    """What a record was asked with is made so, where no installed phase has its name."""
    with ExitStack() as patches:
        for module in ("resuming", "starting", "verify"):
            patches.enter_context(patch(f"runbook.engine.{module}.setup_of_record", make))
        yield


def verify(folder: Path, *phases: Phase, fingerprint: str = "") -> Verification:
    """What `runbook verify` finds in a run of these phases, or of `PHASES`."""
    known = {phase.name: phase for phase in phases} or dict[str, Phase](PHASES)
    made = setup(folder.parent, *known.values())
    with setups_by(lambda _: made):
        return verify_run(folder, fingerprint=fingerprint)


def three_launches() -> tuple[Phase, ...]:
    """A plan with three launches in two phases, long enough to be cut off."""
    words = ("--grandchild",)
    return (
        Toy("baseline", words=words, steps=15),
        Toy("bucket_sweep", count=2, words=words, steps=15, reads=("baseline",)),
    )


def main(argv: list[str]) -> int:
    """The program that the tests kill."""
    if argv[1] == "run":
        record, _ = run(Path(argv[2]), *three_launches())
    else:
        record = resume(Path(argv[2]), *three_launches())
    return {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}.get(
        str(record.options.get("signal")), record.verdict.exit_code
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
