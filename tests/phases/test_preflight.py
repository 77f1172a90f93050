"""Preflight: the wrong machine or checkout is INVALID, a broken trainer FAIL, a doubt a warning."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nsa.contract import CEILINGS_JSON
from phases import preflight
from phases.kit.playbook import playbook
from runbook.config.registry import PlanContext
from runbook.folder.launch.evidence import read_launch
from runbook.records import Check
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.phases import answers, builder, machine_files, spoil, traces
from tests.phases.answers import WHERE, said, says


def test_a_test_that_failed_in_several_cases_is_told_once() -> None:
    def change(cases: Any) -> Any:
        one = next(c for c in cases if "test_documents" in c.classname)
        told = {"test_read[0-1]": "batch 2\nmore", "test_read[0-2]": "batch 3", "test_kept": "gone"}
        failed = (replace(one, name=n, status="failed", message=m) for n, m in told.items())
        return (*cases, *failed)

    check = answers.row("preflight", "documents", spoil.at("junit.cases", change), only=("sanity",))
    wanted = "definition failed: test_read[0-1], [0-2]: batch 2; test_kept: gone"
    says(check, "FAIL test_failed", wanted)


# Tests that say nothing of what they are about: their row does.
ANY = ("test_whole_model", "test_documents")
NO_TOPIC = {
    "test_training_stops_at_a_number_that_is_not_finite",
    "test_what_one_rank_sees_ends_all",
}


@pytest.mark.parametrize("module", [
    module for what in ("whole_model", "documents", "safeguards")
    for module in preflight._SANITY_TESTS[what][1:]
])  # fmt: skip
def test_shipped_tests_name_topics_that_there_are(module: str) -> None:
    """One that is added to the safeguards says which of them it is about."""
    text = files("nsa.tests").joinpath(f"{module}.py").read_text("utf-8")
    named = re.compile(r"mark\.topic\(\"(\w+)\"\)")
    assert {*named.findall(text)} <= set(playbook().by_topic)
    if module not in ANY and not re.search(r"^pytestmark = .*topic", text, re.MULTILINE):
        left = [part for part in text.split("\n\n\n") if not named.search(part)]
        found = re.findall(r"^def (test_\w+)", "\n".join(left), re.MULTILINE)
        assert set(found) == (NO_TOPIC if module == "test_safeguards" else set())


@pytest.mark.parametrize("what", preflight._SANITY_TESTS)
@pytest.mark.parametrize(("status", "wanted"), [
    ("failed", "FAIL test_failed"), ("skipped", "SKIPPED nothing_collected"),
    ("", "INCOMPLETE nothing_collected"),
])  # fmt: skip
def test_sanity_tests_have_to_run(what: str, status: str, wanted: Any) -> None:
    """With the status of these tests; without them if it is none."""
    _, *modules = preflight._SANITY_TESTS[what]

    def change(case: Any) -> Any:
        if case.classname.rpartition(".")[2] not in modules:
            return case
        return replace(case, status=status) if status else None

    assert said(answers.row("preflight", what, spoil.cases(change), only=("sanity",))) == wanted


# A card below its floor is the card's fault, and no document makes a row pass by its form.

CPU = builder.context("cpu")
Edit = Callable[[dict[str, Any]], object]


def measured(where: PlanContext = WHERE, edit: Edit | None = None, **rates: float) -> Any:
    """Preflight with these rates on every rank; `edit` changes the document."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        document = machine_files.document(made.launch, where.profile, **rates)
        if edit:
            edit(document)
        return replace(made, ceilings=document)

    return builder.evidence("preflight", where, change=change, only=("ceilings",))


def test_a_profile_of_gpus_has_to_say_what_is_possible() -> None:
    hardware = WHERE.profile.hardware.model_dump(mode="json")
    hardware["peaks"]["warp"] = hardware["peaks"].pop("host_copy")
    with pytest.raises(ValidationError, match=r"(?s)host_copy is missing.*|unknown warp"):
        builder.with_profile(WHERE, hardware=hardware)


def of_rank_1(third: Any) -> str:
    """The file in which the third time of rank 1 is another value."""
    (made,) = (one for one in builder.PHASES["preflight"].plan(WHERE) if one.kind == "ceilings")
    document = machine_files.document(made, WHERE.profile)
    document["ranks"][1]["matmul"]["seconds"][3] = third
    return json.dumps(document)


@pytest.mark.parametrize(("text", "words"), [
    (of_rank_1(math.nan), "seconds has an unexpected value: 'nan'"),
    (of_rank_1("0.001"), "seconds has an unexpected value: '0.001'"),
    *((text, "ceilings.json") for text in ("", "[]", '{"ranks": "x"}')),
], ids=range(5))  # fmt: skip
def test_a_file_that_is_no_document_is_damaged(tmp_path: Path, text: str, words: str) -> None:
    found = measured()
    made = found.launches["ceilings"]
    traces.write_launch(tmp_path, made)
    (tmp_path / made.launch.run_dir / CEILINGS_JSON).write_text(text)
    read = read_launch(tmp_path, made.launch, made.result)
    found = replace(found, launches={**found.launches, "ceilings": read})
    says(builder.row("preflight", "matmul", found, WHERE), "INVALID damaged_artifact", words)


def mfu_row(earlier: dict[str, PhaseEvidence], where: PlanContext = WHERE, **speed: Any) -> Check:
    return answers.row("baseline", "mfu_of_ceiling", where=where, earlier=earlier, **speed)


def test_mfu_is_held_against_what_this_card_was_measured_with() -> None:
    # 1e5 tok/s of 5e8 FLOPs on two cards of 240 TFLOP/s.
    check = says(mfu_row({"preflight": measured()}, rate=1e5), "PASS ok")
    assert check.measurement is not None
    assert check.measurement.value == pytest.approx(1e5 * 5e8 / (2 * 240e12), rel=1e-3)
    paths = {source.path for source in check.measurement.sources}
    assert {"preflight/ceilings/ceilings.json", "baseline/run1/training.csv"} <= paths
    slow = says(mfu_row({"preflight": measured()}, rate=5e4), "FAIL below_limit")
    assert slow.required
    # The same throughput on a card of half the speed is no fault of the settings.
    card = says(mfu_row({"preflight": measured(matmul=120.0)}, rate=5e4), "PASS ok")
    assert card.measurement.value == pytest.approx(2 * float(slow.measurement.value))


def elsewhere(document: dict[str, Any]) -> None:
    document["ranks"][1]["device"]["uuid"] = "7"


@pytest.mark.parametrize(("earlier", "where", "wanted", "words"), [
    ({}, WHERE, "INCOMPLETE not_run", "preflight phase was not run in this run"),
    # On cores a phase alone stays as it was: what never decides is no open question either.
    ({}, CPU, "SKIPPED not_gated", "was not run"),
    # More than the card can is not plausible, and another card not comparable.
    ({"preflight": measured(matmul=2.0)}, WHERE, "INVALID not_plausible", ""),
    ({"preflight": measured(edit=elsewhere)}, WHERE, "INVALID not_comparable",
     "preflight measured 0, 7"),
])  # fmt: skip
def test_without_ceilings_of_these_devices_there_is_no_share_of_them(
    earlier: dict[str, PhaseEvidence], where: PlanContext, wanted: Any, words: str
) -> None:
    check = says(mfu_row(earlier, where, rate=1e5), wanted, words)
    assert wanted != "INCOMPLETE not_run" or "--phase preflight,baseline" in check.rerun
