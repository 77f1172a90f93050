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


ERODED = [1e5 * 0.99**night for night in range(14)]
NIGHT = ERODED[-1] * 0.99
FIRST = (Outcome.SKIPPED, Reason.NO_ACCEPTED_RUN)
GONE = "baseline/run1/training.csv is not the file"
DAMAGE = {"damaged": {"run7": f"{GONE} of its MANIFEST.sha256"}, "rate": 5e4}
EARLIER = {"damaged": {"run0": "its run.json is gone"}}
CPU = {"where": builder.context("cpu"), "rate": 2e4}


def other(kind: str, fact: str) -> dict[str, Any]:
    return {"facts": {(kind, fact): "another"}}


@pytest.mark.parametrize(("what", "history", "options", "wanted", "words", "remedy"), [
    (LAST, [0.9e5, 1e5], {}, FINE, "against run2 (run.json aaaaaaaaaaaa)", ""),
    (LAST, [1e5], {"rate": 8e4}, TOO_MUCH, "", "runbook compare"),
    (LAST, [1e5], {"rate": 9.4e4}, WARNED, "suspected, not shown", ""),
    # The first run has nothing to lose and is not held back.
    (LAST, [], {}, FIRST, "", ""), (BEST, [], {}, FIRST, "", ""),
    (BEST, [1e5, 1e5], {}, FIRST, "", ""),
    # Slow erosion is held against the best level.
    (LAST, ERODED, {"rate": NIGHT}, FINE, "", ""),
    (BEST, ERODED, {"rate": NIGHT}, TOO_MUCH, "14 earlier runs", ""),
    # A run of another configuration or machine is none; another version is compared and named.
    *((LAST, [2e5], other(*fact), FIRST, "", "") for fact in
      (("work", "config_sha256"), ("machine", "device.name"), ("toggles", "toggle NSA_X"))),
    *((LAST, [2e5], other(*fact), TOO_MUCH, f"differs: {fact[1]} another -> ", "") for fact in
      (("software", "versions.torch"), ("code", "git.sha"), ("software", "driver"),
       ("cards", "device.uuids"))),
    (LAST, [], {"left_out": {"run7": "run.json is not the file of its MANIFEST.sha256"}}, FIRST,
     "not taken: run7: run.json is not the file", ""),
    # A damaged last run is not the same as none: SKIPPED satisfies, and any loss was a GO.
    *((LAST, history, DAMAGE, DAMAGED, f"run7: {GONE}", remedy) for history in ([], [1e5])
      for remedy in ("runbook verify", "move that folder")),
    # Damage before the last accepted run hides the best level only.
    (LAST, [1e5] * 6, EARLIER, FINE, "", ""),
    (BEST, [1e5] * 6, EARLIER, DAMAGED, "run0: its run.json is gone", ""),
    (LAST, [], {"problem": "accepted.json is not JSON"}, DAMAGED, "", ""),
    # On shared cores it is shown and never decides.
    (LAST, [1e5], CPU, NOT_GATED, "is shown", ""),
])  # fmt: skip
def test_what_accepted_runs_make_of_a_run(
    what: str, history: list[float], options: dict[str, Any], wanted: Any, words: str, remedy: str
) -> None:
    says(row(what, *history, **options), wanted, words, remedy=remedy)


def test_the_last_accepted_run_is_a_source() -> None:
    check = row(LAST, 0.9e5, 1e5)
    assert (check.limit, check.comparator.value) == (0.05, "<=")
    sources = {source.path: source.sha256 for source in check.measurement.sources}
    assert sources["baseline/accepted.json"] == heartbeats.SHA
    assert check.measurement.interval[0] < 0.05


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (row(LAST, 1e5, rate=8e4), Verdict.NO_GO),
        (row(LAST), Verdict.GO),
        (row(BEST, 1e5, 1e5), Verdict.GO),
        (row(LAST, **DAMAGE), Verdict.INCOMPLETE),
        # No other skip is enough.
        (row("throughput_aim", 1e5), Verdict.INCOMPLETE),
    ],
)
def test_only_a_first_run_is_a_go_without_a_number(check: Check, verdict: Verdict) -> None:
    assert judge_run([check], [check.id]) is verdict


def test_another_card_of_the_same_model_is_the_same_machine() -> None:
    """The trainer's own list of cards, too: else a slow card that was put in is never seen."""
    card = {"type": "cuda", "name": "NVIDIA A100 80GB PCIe"}
    one, two = (env_facts({"device": card | {"uuids": uuids}}) for uuids in (["1"], ["2"]))
    (found,) = unlike(one, two)
    assert (found.kind, found.what) == ("cards", "device.uuids")
    assert other_work(one, two) == []
