"""What the shipped phases declare: their names, their sources, their remedies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phases.kit import playbook as book
from phases.kit.finding import ending
from phases.kit.playbook import Situation, playbook, situation_of, told
from runbook.config import registry
from runbook.records import Kind, LaunchStatus, Reason
from runbook.records.outcome import STEP
from tests.phases import builder
from tests.phases.answers import ON_A_CPU, ON_TWO_A100

PHASES = registry.phases()
BY_TOPIC, BY_REASON = playbook().by_topic, playbook().by_reason
PAGE = Path(__file__).resolve().parents[3] / "docs" / "phases.md"


def remedy_for(topic: str, code: Reason, now: Situation, *, own: str = "") -> str:
    return told(book.remedy_for(topic, code, now, own=own), now)


_OURS = (
    *("NSA_", "--set", "train.seq_len", "train.lr", "triage", "training.csv", "env.json"),
    *("parity tests", "git checkout", "stackdump", "runbook stacks", "`gradients`"),
)


def test_a_trainer_of_ones_own_is_told_nothing_that_only_ours_has() -> None:
    now = replace(ON_A_CPU, contract=False)
    asked = [row for phase in PHASES.values() for row in phase.asked(builder.context("cpu"))]  # type: ignore[attr-defined]
    theirs = {row.topic for row in asked if row.own and row.topic}
    for topic in theirs | {"crash", "leak", "at_exit", "stall", "timeout", "learns", "plausible"}:
        said = remedy_for(topic, Reason.MISMATCH, now, own=topic)
        assert said and not [word for word in _OURS if word in said], (topic, said)
    assert "shorten its sequences" in remedy_for("memory", Reason.MISMATCH, now, own="memory")
    assert "os._exit(0)" in remedy_for("at_exit", Reason.CRASH, now, own="at_exit")
    assert "shorten its" not in remedy_for("memory", Reason.MISMATCH, ON_A_CPU, own="memory")


def test_every_reason_that_is_not_fine_has_a_remedy() -> None:
    fine = {Reason.OK, Reason.NOT_GATED, Reason.NOT_ASKED_FOR, Reason.NO_ACCEPTED_RUN}
    assert set(Reason) - fine == set(BY_REASON)
    assert all(BY_TOPIC.values()) and all(told(one, ON_A_CPU) for one in BY_REASON.values())


def test_every_topic_that_a_row_names_is_in_the_playbook() -> None:
    asked = [row for phase in PHASES.values() for row in phase.asked(builder.on_nodes(4))]  # type: ignore[attr-defined]
    topics = {row.topic for row in asked}
    assert topics - {""} <= set(BY_TOPIC)


def test_a_launch_that_ended_badly_is_mended_before_its_topic() -> None:
    assert "NSA_ACCUM" in remedy_for("throughput", Reason.BELOW_LIMIT, ON_TWO_A100)
    assert remedy_for("throughput", Reason.HANG, ON_A_CPU) == told(BY_TOPIC["stall"], ON_A_CPU)


@pytest.mark.parametrize(
    ("changed", "topic", "advice"),
    [
        ({"ranks": 1}, "stall", "NCCL_DEBUG"),
        ({"pcie": False}, "throughput", "PCIe"),
        ({"dtype": "fp32"}, "loss", "bf16"),
        ({"seq_len": 128}, "memory", "1024"),
        ({"ranks": 1}, "memory", "under DDP"),
    ],
)
def test_advice_is_given_where_it_fits_and_nowhere_else(
    changed: dict[str, Any], topic: str, advice: str
) -> None:
    assert advice in remedy_for(topic, Reason.MISMATCH, ON_TWO_A100, own=topic)
    other = remedy_for(topic, Reason.MISMATCH, replace(ON_TWO_A100, **changed), own=topic)
    assert other and advice not in other


@pytest.mark.parametrize("topic", BY_TOPIC)
def test_no_remedy_asks_a_cpu_for_what_only_a_gpu_has_or_is_cut_within_code(topic: str) -> None:
    """Pages list a remedy's steps, which `; ` separates, one below the other."""
    on_gpus, on_cpu = (
        remedy_for(topic, Reason.MISMATCH, where, own=topic) for where in (ON_TWO_A100, ON_A_CPU)
    )
    assert all(step.count("`") % 2 == 0 for step in on_gpus.split(STEP)), on_gpus
    names_a_gpu = topic in ("cuda", "preempted")
    assert names_a_gpu or not re.search(r"NCCL|GPU|PCIe|nvidia|flash", on_cpu), on_cpu


def test_what_helps_on_a_cpu_alone_is_no_advice_on_gpus() -> None:
    on_gpus, on_cpu = (
        remedy_for("scaling", Reason.MISMATCH, where, own="scaling")
        for where in (ON_TWO_A100, ON_A_CPU)
    )
    assert "cores of its own" in on_cpu and "cores of its own" not in on_gpus


def test_the_situation_is_that_of_the_launches_before_that_of_the_profile() -> None:
    where = builder.context()
    launches = list(builder.evidence("baseline", where).launches.values())
    as_ran = situation_of(where.profile, launches, [f"{launches[1].launch.run_dir}/training.csv"])
    folder = launches[1].launch.run_dir
    assert as_ran == replace(ON_TWO_A100, folder=folder, lower_lr="2e-05")
    given = launches[0].launch.model_copy(update={"config_overrides": {"train.lr": 1e6}})
    by_hand = situation_of(where.profile, [replace(launches[0], launch=given)])
    assert by_hand.lower_lr == ""  # a tenth of what a person took is no advice
    fp32 = {**dict(launches[0].env or {}), "effective": {"dtype": "fp32", "seq_len": 128}}
    changed = situation_of(where.profile, [replace(launches[0], env=fp32)])
    assert (changed.dtype, changed.seq_len) == ("fp32", 128)


def test_every_end_of_a_launch_has_a_remedy_of_its_own() -> None:
    made = builder.evidence("nvtx", builder.context("cpu")).launches["profiled"]

    def told(status: LaunchStatus, kind: Kind = Kind.NONE) -> str:
        result = made.result.model_copy(update={"status": status, "kind": kind})
        end = ending(replace(made, result=result))
        return remedy_for("plausible", end.code, ON_TWO_A100, own=end.topic)

    ends = [one for one in LaunchStatus if one is not LaunchStatus.COMPLETED]
    by_status = {status: told(status) for status in ends}
    by_kind = {kind: told(LaunchStatus.CRASHED, kind) for kind in Kind if kind is not Kind.NONE}
    remedies = [*by_status.values(), *by_kind.values()]
    assert all(remedies) and len(set(remedies)) == len(remedies)


def test_the_page_of_phases_has_each_in_order_and_the_rows_that_all_training_ones_share() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table, _, told = text.partition("Every phase that trains also has these rows ")
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(PHASES)
    where = builder.context()
    rows = [
        {row.what for row in phase.rows()}  # type: ignore[attr-defined]
        for phase in PHASES.values()
        if not phase.optional and "trainer" in {launch.kind for launch in phase.plan(where)}
    ]
    cells = re.findall(r"^\| (`.+?`) \|", told.partition("\n## ")[0], re.MULTILINE)
    shared = re.findall(r"`(\w+)`", " ".join(cells))
    assert set(shared) == set.intersection(*rows)
    fineweb = {row.what for row in PHASES["fineweb"].rows()}  # type: ignore[attr-defined]
    assert set(shared) - fineweb == {"plausible", "toggles_effective"}
    regression = {row.what for row in PHASES["regression"].rows()}  # type: ignore[attr-defined]
    assert set(shared) - regression == {"devices", "toggles_effective"}
