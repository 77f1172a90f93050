"""What the shipped phases declare: their names, their sources, their remedies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from phases.common.case import ending
from phases.playbook import ALONE, BY_REASON, BY_TOPIC, remedy_for
from runbook import registry
from runbook.records import Kind, LaunchStatus, Reason
from runbook.registry import known_checks, known_limits
from tests.phases import builder

PHASES = registry.phases()
PAGE = Path(__file__).resolve().parents[2] / "docs" / "phases.md"


def test_every_phase_says_what_it_is_and_where_it_comes_from() -> None:
    for name, phase in PHASES.items():
        assert phase.name == name and phase.title
        assert phase.question.endswith("?")
        assert phase.source.startswith(("requirements ", "choice"))


def test_preflight_and_nothing_else_stops_the_phases_after_it() -> None:
    assert [name for name, phase in PHASES.items() if phase.guards] == ["preflight"]


def test_check_ids_are_unique() -> None:
    ids = known_checks(builder.context().profile)
    assert len(set(ids)) == len(ids) > 100
    assert len(known_limits(PHASES)) >= 20


def test_every_reason_that_is_not_fine_has_a_remedy() -> None:
    fine = {Reason.OK, Reason.NOT_GATED, Reason.NOT_ASKED_FOR, Reason.NO_ACCEPTED_RUN}
    assert set(Reason) - fine == set(BY_REASON)
    assert all(BY_TOPIC.values()) and all(BY_REASON.values())


def test_every_topic_that_a_row_names_is_in_the_playbook() -> None:
    topics = {row.topic for phase in PHASES.values() for row in phase.rows()}  # type: ignore[attr-defined]
    assert topics - {""} <= set(BY_TOPIC)


def test_a_launch_that_ended_badly_is_mended_before_its_topic() -> None:
    assert remedy_for("throughput", Reason.BELOW_LIMIT) == BY_TOPIC["throughput"]
    assert remedy_for("throughput", Reason.HANG) == BY_REASON[Reason.HANG]
    assert remedy_for("", Reason.UNDECIDED) == BY_REASON[Reason.UNDECIDED]


def test_one_rank_has_remedies_of_its_own_for_topics_that_there_are() -> None:
    assert set(ALONE) <= set(BY_TOPIC)
    assert remedy_for("throughput", Reason.BELOW_LIMIT, ranks=1) == ALONE["throughput"]
    assert remedy_for("memory", Reason.BELOW_LIMIT, ranks=1) == BY_TOPIC["memory"]
    assert "NSA_DDP" not in "".join(ALONE.values())


def test_every_end_of_a_launch_has_a_remedy_of_its_own() -> None:
    made = builder.evidence("nvtx", builder.context("cpu")).launches["profiled"]

    def told(status: LaunchStatus, kind: Kind = Kind.NONE) -> str:
        result = made.result.model_copy(update={"status": status, "kind": kind})
        end = ending(replace(made, result=result))
        return remedy_for("plausible", end.code, own=end.topic)

    ends = [one for one in LaunchStatus if one is not LaunchStatus.COMPLETED]
    by_status = {status: told(status) for status in ends}
    by_kind = {kind: told(LaunchStatus.CRASHED, kind) for kind in Kind if kind is not Kind.NONE}
    remedies = [*by_status.values(), *by_kind.values()]
    assert all(remedies) and len(set(remedies)) == len(remedies)


def test_the_page_of_phases_has_each_in_order_and_the_rows_that_all_training_ones_share() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table, _, told = text.partition("Every phase that trains also has the rows ")
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(PHASES)
    where = builder.context()
    rows = [
        {row.what for row in phase.rows()}  # type: ignore[attr-defined]
        for phase in PHASES.values()
        if not phase.optional and "trainer" in {launch.kind for launch in phase.plan(where)}
    ]
    shared = re.findall(r"`(\w+)`", told.partition(";")[0])
    assert set(shared) == set.intersection(*rows)
    fineweb = {row.what for row in PHASES["fineweb"].rows()}  # type: ignore[attr-defined]
    assert set(shared) - fineweb == {"plausible", "toggles_effective"}
    regression = {row.what for row in PHASES["regression"].rows()}  # type: ignore[attr-defined]
    assert set(shared) - regression == {"devices", "toggles_effective"}
