"""A shortened run: as long as fits, judgeable, and never a GO without its scope."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runbook.config import Profile, Settings, load_profile
from runbook.config.setup import RunOptions, Setup
from runbook.engine.prepare import prepare
from runbook.engine.scope import departures
from runbook.records import Launch
from runbook.registry import select
from runbook.tools.acceptance.shorten import Pace, Shortened, shorten

PHASES = tuple(select("all"))


def plan(profile: Profile) -> list[Launch]:
    options = RunOptions(profile="h200x1")
    setup = Setup(options=options, profile=profile, settings=Settings(), phases=PHASES)
    return [launch for phase in PHASES for launch in phase.plan(setup.context({}))]


def cut(pace: Pace, fit_s: float, name: str = "h200x1", phases: tuple[str, ...] = ()) -> Shortened:
    profile, least = load_profile(name), load_profile("cpu")
    return shorten(profile, least, phases=phases, pace=pace, fit_s=fit_s, plan=plan)


SLOW = Pace(step_s=0.26, start_s=20.0)


def test_all_of_it_where_it_fits() -> None:
    found = cut(SLOW, 1e6)
    assert found.share == 1.0 and found.changes == {}
    assert found.profile == load_profile("h200x1")
    assert found.described().startswith("nothing was cut")


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_as_long_as_fits(part: float) -> None:
    whole, least = SLOW.seconds(plan(load_profile("h200x1"))), cut(SLOW, 1.0).seconds
    fit_s = least + part * (whole - least)
    found = cut(SLOW, fit_s)
    assert 0.9 * fit_s < found.seconds <= fit_s
    assert SLOW.seconds(plan(found.profile)) == found.seconds
    assert 0.0 < found.share < 1.0
    assert cut(SLOW, fit_s + 0.15 * (whole - least)).share > found.share


def test_the_least_where_nothing_fits() -> None:
    found = cut(SLOW, 1.0)
    assert found.share == 0.0 and found.seconds > 1.0
    least = load_profile("cpu")
    for name, values in found.changes.items():
        for key, value in values.items():
            assert value == getattr(least.phases[name], key)


def test_no_limit_and_no_required_check_changes() -> None:
    found, whole = cut(SLOW, 600.0), load_profile("h200x1")
    assert found.profile.limits == whole.limits
    assert found.profile.required == whole.required
    assert found.profile.env == whole.env


@pytest.mark.parametrize("name", ["h200x1", "a100x1", "h100x1", "a100x2_pcie4", "h200x2_nvlink"])
def test_the_written_profile_is_a_run_that_says_what_it_leaves_out(
    tmp_path: Path, name: str
) -> None:
    """The file is loaded as a run would; its verdict cannot be an unqualified GO."""
    found = cut(SLOW, 600.0, name)
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(found.document(name, ())))
    loaded = prepare(RunOptions(profile=str(path))).profile
    assert loaded.phases["long_run"].steps == found.profile.phases["long_run"].steps < 1200
    caveats = departures(loaded, Settings())
    assert any(text.startswith("fewer steps (") and "long_run.steps=" in text for text in caveats)


def test_a_run_of_some_phases_says_for_how_many_checks(tmp_path: Path) -> None:
    found = cut(SLOW, 600.0, phases=("preflight", "baseline"))
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(found.document("h200x1", ("preflight", "baseline"))))
    caveats = departures(load_profile(str(path)), Settings())
    whole = len(load_profile("h200x1").required)
    assert caveats[0] == f"for {len(found.profile.required)} of {whole} checks"
    assert 0 < len(found.profile.required) < whole


def test_the_pace_counts_every_launch() -> None:
    launches = plan(load_profile("cpu"))
    pace = Pace(step_s=2.0, start_s=10.0)
    trainers = [launch for launch in launches if launch.kind == "trainer"]
    steps = sum(launch.steps for launch in trainers)
    tests = 30.0 * (len(launches) - len(trainers))
    assert pace.seconds(launches) == pytest.approx(10.0 * len(trainers) + 2.0 * steps + tests)
