"""A plan that stops: nothing starts behind a phase that did not pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.config.phase import PlanContext
from runbook.config.profile import PlanNote
from runbook.config.setup import Setup
from runbook.engine.extend import Extension
from runbook.engine.resuming import resume_run
from runbook.engine.run import run_setup
from runbook.engine.starting import known_end
from runbook.errors import UsageError
from runbook.launch.observer import Observer
from runbook.records import (
    Launch,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    RunRecord,
    Verdict,
)
from tests.engine import toys
from tests.engine.test_interrupt_and_resume import digests
from tests.engine.toys import Toy
from tests.launch.helpers import fake_launch


def setup(out: Path, *phases: Toy, stops: bool = True, keep_going: bool = False) -> Setup:
    names = tuple(phase.name for phase in phases)
    note = PlanNote(name="toy", shipped=False, stops=stops, phases=names)
    profile = toys.profile(phases).model_copy(update={"plan": note})
    asked = toys.setup(out, *phases, phases=",".join(names), keep_going=keep_going)
    return Setup(
        options=asked.options, profile=profile, settings=asked.settings, phases=asked.phases
    )


def broken(**changes: object) -> Toy:
    return Toy("bucket_sweep", words=("--fault", "exit7"), **changes)  # type: ignore[arg-type]


def three(second: Toy) -> tuple[Toy, ...]:
    return (Toy("baseline"), second, Toy("long_run"))


def started(record: RunRecord, phase: str) -> int:
    found = next(one for one in record.phases if one.name == phase)
    return sum(entry.result.attempts for entry in found.launches)


@pytest.mark.parametrize("keep_going", [False, True])
def test_the_first_no_go_stops_the_plan(tmp_path: Path, keep_going: bool) -> None:
    asked = setup(tmp_path, *three(broken()), keep_going=keep_going)
    record = run_setup(asked, observer=Observer())
    assert record.verdict is Verdict.NO_GO
    assert (started(record, "baseline"), started(record, "long_run")) == (1, 0)
    left = next(one for one in record.phases if one.name == "long_run").launches[0].result
    assert left.follows == "bucket_sweep.completed"
    assert "--keep-going" not in left.cause


def test_a_plan_goes_on_once_what_failed_was_run_again(tmp_path: Path) -> None:
    record = run_setup(setup(tmp_path, *three(broken())), observer=Observer())
    fixed = three(Toy("bucket_sweep"))
    again = resume_run(
        tmp_path / record.run_id,
        observer=Observer(),
        make_setup=lambda _: setup(tmp_path, *fixed),
        extension=Extension(failed=True, command="again"),
    )
    assert again.verdict is Verdict.GO
    assert "REPEATED (bucket_sweep after FAIL" in again.said


def test_a_leg_does_not_start_from_one_that_did_not_finish() -> None:
    first = fake_launch(name="leg1")
    second = fake_launch(name="leg2").model_copy(update={"resumes": "leg1", "after": 5})
    for status, starts in ((LaunchStatus.COMPLETED, True), (LaunchStatus.TIMED_OUT, False)):
        entry = LaunchEntry(launch=first, result=LaunchResult(status=status))
        found = known_end(second, [entry])
        assert (found is None) is starts
    assert found is not None and "goes on from leg1" in found.cause


class _Legs(Toy):
    """Two launches, of which the second ends badly with these words."""

    def __init__(self, *words: str) -> None:
        super().__init__("bucket_sweep", count=2)
        self.second = words

    def plan(self, context: PlanContext) -> list[Launch]:
        first, second = super().plan(context)
        return [first, second.model_copy(update={"argv": (*second.argv, *self.second)})]


def test_a_plan_goes_on_after_a_crash_with_what_had_not_finished(tmp_path: Path) -> None:
    crashed, whole = _Legs("--fault", "exit7"), _Legs()
    record = run_setup(setup(tmp_path, *three(crashed)), observer=Observer())
    run = tmp_path / record.run_id
    assert record.verdict is Verdict.NO_GO
    kept = digests(run / "bucket_sweep/run1")

    def make(_: RunRecord) -> Setup:
        return setup(tmp_path, *three(whole))

    again = resume_run(run, observer=Observer(), make_setup=make)
    assert again.verdict is Verdict.GO, again.reasons
    assert digests(run / "bucket_sweep/run1") == kept, "what had finished is not repeated"
    assert (run / "bucket_sweep/run2.repeated1/result.json").is_file(), "the crash is kept"
    assert any("REPEATED (bucket_sweep after FAIL" in text for text in again.caveats)
    assert started(again, "long_run") == 1, "and the plan goes on behind it"
    with pytest.raises(UsageError, match="is finished: GO"):
        resume_run(run, observer=Observer(), make_setup=make)


def test_a_plan_that_ended_with_a_finding_does_not_go_on(tmp_path: Path) -> None:
    asked = setup(tmp_path, *three(Toy("bucket_sweep", words=("--fault", "nan"))))
    record = run_setup(asked, observer=Observer())
    ends = [one.result.status for one in record.phases[1].launches]
    assert ends == [LaunchStatus.NON_FINITE]
    with pytest.raises(UsageError, match="is finished: NO-GO"):
        resume_run(tmp_path / record.run_id, observer=Observer(), make_setup=lambda _: asked)
