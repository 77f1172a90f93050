"""A second attempt is seen everywhere; a launch whose end is known is not started again."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from runbook.engine.derive import render
from runbook.engine.starting import known_end
from runbook.records import LaunchEntry, LaunchResult, LaunchStatus, RankExit, Verdict
from tests.engine.toys import Toy, run
from tests.launch.helpers import fake_launch


def test_a_launch_that_needed_a_second_attempt_is_in_the_first_line_and_in_junit(
    tmp_path: Path,
) -> None:
    """The collective library fails once; without this, the run looked like any healthy one."""
    mark = tmp_path / "once"
    toy = Toy("baseline", words=("--fault", "nccl", "--once", str(mark)))
    made, _ = run(tmp_path / "out", toy, Toy("nvtx"), retry=True)
    assert made.verdict is Verdict.GO, "a toy has no limit for it"
    assert [phase.flaky for phase in made.phases] == [("run1",), ()]
    assert "FLAKY (baseline/run1 needed a second attempt)" in made.headline
    for name in ("terminal", "md", "html"):
        assert "FLAKY (baseline/run1" in render(made, name)
    assert "FLAKY: run1" in render(made, "terminal")
    root = ElementTree.fromstring(render(made, "junit"))
    suites = {suite.get("name"): suite for suite in root}
    found = suites["baseline"].find("properties/property[@name='flaky']")
    assert found is not None and found.get("value") == "run1"
    assert suites["nvtx"].find("properties") is None
    assert "FLAKY" in (suites["verdict"].findtext("testcase/system-out") or "")


@pytest.mark.parametrize(("fault", "started"), [("config", 1), ("nan", 1), ("", 3)])
def test_a_deterministic_end_is_not_repeated(tmp_path: Path, fault: str, started: int) -> None:
    words = ("--fault", fault) if fault else ()
    made, folder = run(tmp_path, Toy("baseline", count=3, words=words))
    results = [entry.result for entry in made.phases[0].launches]
    assert [result.attempts for result in results] == [1] * started + [0] * (3 - started)
    assert len(list((folder / "baseline").iterdir())) == started
    if fault == "config":
        assert results[0].status is LaunchStatus.CONFIG_ERROR
        assert results[2].status is LaunchStatus.NOT_RUN
        assert results[2].cause == f"run1 was refused: {results[0].cause}"
    elif fault:
        assert {result.status for result in results[1:]} == {LaunchStatus.NOT_RUN}
        assert {result.follows for result in results[1:]} == {"baseline/run1"}
        assert results[2].cause.startswith("run1 is the same command and ended badly (")


def ended(status: LaunchStatus, cause: str, *words: str, signal: str = "") -> LaunchEntry:
    ranks = (RankExit(rank=0, code=-9, signal=signal),) if signal else ()
    result = LaunchResult(status=status, cause=cause, culprit_rank=0, ranks=ranks)
    return LaunchEntry(launch=fake_launch(*words), result=result)


NAN = LaunchStatus.NON_FINITE


@pytest.mark.parametrize(
    "entries",
    [
        [ended(NAN, "NaN at step 3", "--dt", "9")],
        [ended(LaunchStatus.CRASHED, "rank 0 was ended by SIGSEGV", signal="SIGSEGV")],
        [ended(LaunchStatus.HUNG, "x")],
        [ended(LaunchStatus.TIMED_OUT, "x"), ended(LaunchStatus.TIMED_OUT, "x")],
        [ended(LaunchStatus.CONFIG_ERROR, "x", "--dt", "9")],
        [ended(LaunchStatus.COMPLETED, ""), ended(LaunchStatus.COMPLETED, "")],
    ],
)
def test_whatever_may_end_otherwise_is_started(entries: list[LaunchEntry]) -> None:
    assert known_end(fake_launch(), entries) is None


def test_a_signal_may_be_an_accident_once_whichever_rank_it_hit() -> None:
    entries = [
        ended(LaunchStatus.CRASHED, f"rank {n} was ended by SIGSEGV", signal="SIGSEGV")
        for n in (0, 1)
    ]
    found = known_end(fake_launch(name="three"), entries)
    assert found is not None and "a rank was ended by SIGSEGV" in found.cause


def test_a_machine_that_refuses_one_launch_refuses_all_of_the_phase() -> None:
    entry = ended(LaunchStatus.ENVIRONMENT_ERROR, "no driver", "--dt", "9")
    found = known_end(fake_launch(), [entry])
    assert found is not None
    assert (found.status, found.attempts) == (LaunchStatus.NOT_RUN, 0)
    assert found.cause == f"{entry.launch.name} was refused: no driver"
