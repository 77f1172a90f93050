"""The registry: running order, selection by name, and what it refuses."""

from __future__ import annotations

import pytest

from phases.playbook import BY_REASON, BY_TOPIC, remedy_for
from phases.registry import PHASES, known_checks, known_limits, register, select
from runbook.errors import UsageError
from runbook.records import Reason
from tests.phases import builder


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="two phases are called 'nvtx'"):
        register([PHASES["nvtx"], PHASES["nvtx"]])


def test_a_phase_cannot_read_one_that_runs_later() -> None:
    with pytest.raises(ValueError, match="single_gpu reads baseline"):
        register([PHASES["single_gpu"], PHASES["baseline"]])


def test_selection_keeps_the_running_order() -> None:
    assert [phase.name for phase in select("long_run, baseline")] == ["baseline", "long_run"]
    assert [phase.name for phase in select("fineweb")] == ["fineweb"]
    assert len(select("all")) == 9
    assert [phase.name for phase in select("fineweb,all")] == list(PHASES)


def test_every_wrong_name_is_told() -> None:
    with pytest.raises(UsageError) as caught:
        select("basline,nvtx,nvtx,")
    assert len(caught.value.problems) == 3
    assert "no phase 'basline' (did you mean 'baseline'?)" in str(caught.value)
    assert "phase 'nvtx' is named twice" in str(caught.value)


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
