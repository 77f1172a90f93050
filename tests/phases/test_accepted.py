"""The third floor: the last accepted run, and the best level that accepted runs held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.folder.facts import env_facts, other_work, unlike
from runbook.records import Check, Outcome, Reason, Verdict, judge_run
from tests.phases import builder, heartbeats, traces
from tests.phases.answers import DAMAGED, FINE, NOT_GATED, TOO_MUCH, WARNED, WHERE, says

LAST, BEST = "against_last_accepted", "against_best_accepted"


def row(
    what: str,
    *history: float,
    rate: float = 1e5,
    where: Any = WHERE,
    facts: dict[tuple[str, str], str] | None = None,
    **fields: Any,
) -> Check:
    """The row of a run at `rate` after accepted runs at these rates."""
    found = builder.evidence("baseline", where)
    launches = {
        name: traces.healthy(made.launch, where.profile, rate=rate * (1 + 0.01 * index))
        for index, (name, made) in enumerate(found.launches.items())
    }
    found = replace(found, launches=launches)
    accepted = builder.accepted(found, *history, facts=facts).model_copy(update=fields)
    return builder.row("baseline", what, replace(found, accepted=accepted), where)


def test_a_run_as_fast_as_the_last_accepted_one_passes_with_its_source() -> None:
    check = says(row(LAST, 0.9e5, 1e5), FINE, "against run2 (run.json aaaaaaaaaaaa)")
    assert (check.limit, check.comparator.value) == (0.05, "<=")
    measured = check.measurement
    sources = {source.path: source.sha256 for source in measured.sources}
    assert sources["baseline/accepted.json"] == heartbeats.SHA
    assert measured.interval is not None and measured.interval[0] < 0.05


def test_a_loss_that_is_shown_fails_and_is_no_go() -> None:
    check = says(row(LAST, 1e5, rate=8e4), TOO_MUCH, remedy="runbook compare")
    assert judge_run([check], [check.id]) is Verdict.NO_GO


def test_a_loss_that_is_only_suspected_is_a_warning() -> None:
    says(row(LAST, 1e5, rate=9.4e4), WARNED, "suspected, not shown")


def test_the_first_run_has_nothing_to_lose_and_is_not_held_back() -> None:
    for check in (row(LAST), row(BEST), row(BEST, 1e5, 1e5)):
        assert (check.outcome, check.code) == (Outcome.SKIPPED, Reason.NO_ACCEPTED_RUN)
        assert judge_run([check], [check.id]) is Verdict.GO
    other = row("throughput_aim", 1e5)
    assert other.outcome is Outcome.SKIPPED
    assert judge_run([other], [other.id]) is Verdict.INCOMPLETE, "no other skip is enough"


def test_slow_erosion_is_held_against_the_best_level() -> None:
    history = [1e5 * 0.99**night for night in range(14)]
    assert row(LAST, *history, rate=history[-1] * 0.99).outcome is Outcome.PASS
    check = row(BEST, *history, rate=history[-1] * 0.99)
    assert check.outcome is Outcome.FAIL
    assert "14 earlier runs" in check.reason


@pytest.mark.parametrize(
    "fact", [("work", "config_sha256"), ("machine", "device.name"), ("toggles", "toggle NSA_X")]
)
def test_a_run_of_another_configuration_or_machine_is_none(fact: tuple[str, str]) -> None:
    check = row(LAST, 2e5, facts={fact: "another"})
    assert check.code is Reason.NO_ACCEPTED_RUN


@pytest.mark.parametrize(
    "fact",
    [
        ("software", "versions.torch"),
        ("code", "git.sha"),
        ("software", "driver"),
        ("cards", "device.uuids"),
    ],
)
def test_another_version_is_compared_and_named(fact: tuple[str, str]) -> None:
    check = row(LAST, 2e5, facts={fact: "another"})
    assert check.outcome is Outcome.FAIL
    assert f"differs: {fact[1]} another -> " in check.reason


def test_another_card_of_the_same_model_is_the_same_machine() -> None:
    """The trainer's own list of cards, too: else a slow card that was put in is never seen."""
    card = {"type": "cuda", "name": "NVIDIA A100 80GB PCIe", "uuids": ["1", "2"]}
    one, two = (env_facts({"device": card | {"uuids": uuids}}) for uuids in (["1"], ["2"]))
    (found,) = unlike(one, two)
    assert (found.kind, found.what) == ("cards", "device.uuids")
    assert other_work(one, two) == []


def test_a_run_that_was_not_taken_is_named() -> None:
    check = row(LAST, left_out={"run7": "run.json is not the file of its MANIFEST.sha256"})
    assert "not taken: run7: run.json is not the file" in check.reason


def test_a_damaged_last_accepted_run_is_not_the_same_as_none() -> None:
    """It was SKIPPED, which satisfies: damaging one file of the last run made any loss a GO."""
    damaged = {"run7": "baseline/run1/training.csv is not the file of its MANIFEST.sha256"}
    for history in ([], [1e5]):
        check = row(LAST, *history, rate=5e4, damaged=damaged)
        says(check, DAMAGED, "run7: baseline/run1/training.csv is not the file")
        assert "runbook verify" in check.remedy and "move that folder" in check.remedy
        assert judge_run([check], [check.id]) is Verdict.INCOMPLETE


def test_damage_before_the_last_accepted_run_hides_the_best_level_only() -> None:
    damaged = {"run0": "its run.json is gone"}
    history = [1e5] * 6
    assert row(LAST, *history, damaged=damaged).outcome is Outcome.PASS
    says(row(BEST, *history, damaged=damaged), DAMAGED, "run0: its run.json is gone")


def test_a_damaged_file_is_no_first_run() -> None:
    says(row(LAST, problem="accepted.json is not JSON"), DAMAGED)


def test_on_shared_cores_it_is_shown_and_never_decides() -> None:
    check = says(row(LAST, 1e5, rate=2e4, where=builder.context("cpu")), NOT_GATED, "is shown")
    assert check.measurement is not None
