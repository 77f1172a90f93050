"""What the shipped phases declare: their names, their sources, their remedies."""

from __future__ import annotations

from phases.playbook import BY_REASON, BY_TOPIC, remedy_for
from runbook import registry
from runbook.records import Reason
from runbook.registry import known_checks, known_limits
from tests.phases import builder

PHASES = registry.phases()


def test_every_phase_says_what_it_is_and_where_it_comes_from() -> None:
    for name, phase in PHASES.items():
        assert phase.name == name and phase.title
        assert phase.question.endswith("?") and phase.source.startswith("seed 000, ")


def test_check_ids_are_unique() -> None:
    ids = known_checks(builder.context().profile)
    assert len(set(ids)) == len(ids) > 100
    assert len(set(known_limits())) == len(known_limits())


def test_every_reason_that_is_not_fine_has_a_remedy() -> None:
    fine = {Reason.OK, Reason.NOT_GATED, Reason.NOT_ASKED_FOR}
    assert set(Reason) - fine == set(BY_REASON)
    assert all(BY_TOPIC.values()) and all(BY_REASON.values())


def test_every_topic_that_a_row_names_is_in_the_playbook() -> None:
    where = builder.context()
    topics = {row.topic for phase in PHASES.values() for row in phase.rows(where)}  # type: ignore[attr-defined]
    assert topics - {""} <= set(BY_TOPIC)


def test_a_launch_that_ended_badly_is_mended_before_its_topic() -> None:
    assert remedy_for("throughput", Reason.BELOW_LIMIT) == BY_TOPIC["throughput"]
    assert remedy_for("throughput", Reason.HANG) == BY_REASON[Reason.HANG]
    assert remedy_for("", Reason.UNDECIDED) == BY_REASON[Reason.UNDECIDED]
