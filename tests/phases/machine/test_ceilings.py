"""A card below its floor is the card's fault, and no document makes a row pass by its form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nsa.contract import CEILINGS_JSON, Ceiling
from runbook.config.phase import PlanContext
from runbook.folder.launch.evidence import read_launch
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.phases import answers, builder, ceiling_files, on_disk, spoil
from tests.phases.answers import (
    FINE,
    IMPOSSIBLE,
    NOT_GATED,
    NOT_RUN,
    NOTHING,
    TOO_LITTLE,
    UNLIKE,
    WHERE,
    said,
    says,
)

ROWS = ("matmul", "memory_copy", "host_copy", "all_reduce")
WRONG = (Outcome.INVALID, Reason.WRONG_ENVIRONMENT)
DAMAGED = (Outcome.INVALID, Reason.DAMAGED_ARTIFACT)
Edit = Callable[[dict[str, Any]], object]


def preflight(where: PlanContext = WHERE, edit: Edit | None = None, **rates: float) -> Any:
    """Preflight with these rates on every rank; `edit` changes the document."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        document = ceiling_files.document(made.launch, where.profile, **rates)
        if edit:
            edit(document)
        return replace(made, ceilings=document)

    return builder.evidence("preflight", where, change=change, only=("ceilings",))


def row(what: str, where: PlanContext = WHERE, edit: Edit | None = None, **rates: float) -> Check:
    return builder.row("preflight", what, preflight(where, edit, **rates), where)


# Half the clock, half the memory clock, half the width of the link, NCCL over the host.
SICK = {
    "a100x2_pcie4": (156.0, 820.0, 13.0, 5.0),
    "h100x2_nvlink": (490.0, 1500.0, 27.0, 25.0),
    "h200x1": (490.0, 2150.0, 27.0, None),
}


def _slower_on(rank: int, what: str, share: float) -> Edit:
    """One rank reaches this share of what the document says of it, in all three of its sources."""

    def edit(document: dict[str, Any]) -> None:
        one = document["ranks"][rank][what] = dict(document["ranks"][rank][what])
        one["seconds"] = [second / share for second in one["seconds"]]
        one["host_s"] /= share
        one["rate"] *= share

    return edit


@pytest.mark.parametrize("what", ["matmul", "memory_copy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_card_above_its_floor_that_falls_behind_the_other_is_named(what: str, rank: int) -> None:
    check = row(what, edit=_slower_on(rank, what, 0.83))
    says(check, WRONG, f"on rank {rank} ", "83% of the fastest")
    assert row(what, edit=_slower_on(rank, what, 0.92)).outcome is Outcome.PASS


def test_a_product_of_another_type_is_no_ceiling_of_this_training() -> None:
    check = row("matmul", edit=lambda document: [
        one["matmul"].update(dtype="fp8") for one in document["ranks"]
    ])  # fmt: skip
    says(check, IMPOSSIBLE, "the profile trains in bf16")


@pytest.mark.parametrize("name", SICK)
def test_a_sick_card_or_link_is_the_environments_fault(name: str) -> None:
    where = builder.context(name)
    for what, rate in zip(ROWS, SICK[name], strict=True):
        if rate is None:
            assert said(row(what, where)) == (Outcome.SKIPPED, Reason.NEEDS_GPUS)
            continue
        assert said(row(what, where)) == (Outcome.PASS, Reason.OK)
        check = says(row(what, where, **{what: rate}), WRONG, "not a setting")
        assert check.required and check.remedy
        assert check.measurement.value == pytest.approx(rate)
        assert check.measurement.path == "preflight/ceilings/ceilings.json"


def test_the_slowest_rank_decides_and_is_named() -> None:
    def one_slow(document: dict[str, Any]) -> None:
        document["ranks"][1]["matmul"] = ceiling_files.measured(Ceiling.MATMUL, 100.0)

    check = row("matmul", edit=one_slow)
    says(check, WRONG, "100 TFLOP/s on rank 1 (A100, 1), the slowest of 2", "the fastest has 240")


def test_on_shared_cores_every_number_is_shown_and_none_decides() -> None:
    where = builder.context("cpu")
    for what in ("matmul", "memory_copy", "all_reduce"):
        check = says(row(what, where, **{what: 1e-6}), NOT_GATED)
        assert check.measurement
        assert not check.required
    assert said(row("host_copy", where)) == (Outcome.SKIPPED, Reason.NEEDS_CUDA)


# What the specification allows, in the order of ROWS.
ALLOWED = {
    "a100x2_pcie4": (312.0, 1935.0, 31.5, 31.5),
    "h100x2_nvlink": (1070.0, 3350.0, 63.0, 450.0),
    "h200x1": (1070.0, 4800.0, 63.0, None),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_more_than_the_specification_allows_was_not_measured(name: str) -> None:
    where = builder.context(name)
    for what, most in zip(ROWS, ALLOWED[name], strict=True):
        if most is None:
            continue
        assert said(row(what, where, **{what: 1.02 * most})) == (Outcome.PASS, Reason.OK)
        for share in (1.04, 20.0):
            check = row(what, where, **{what: share * most})
            says(check, IMPOSSIBLE, f"1.03 times the {most:g} that are possible")
            assert "hardware.peaks" in check.remedy


def resized(what: str, share: float) -> Edit:
    """Calls of this share of the size, in as much less time, so that the rate stays."""

    def edit(document: dict[str, Any]) -> None:
        for rank in document["ranks"]:
            one = rank[what] = dict(rank[what])
            key, power = ("size", 3) if what == "matmul" else ("bytes", 1)
            one[key] = int(one[key] * share)
            one["seconds"] = [second * share**power for second in one["seconds"]]
            one["host_s"] *= share**power

    return edit


@pytest.mark.parametrize(
    ("what", "enough", "too_little"),
    [("matmul", 1 / 2, 1 / 4), ("memory_copy", 1 / 8, 2 / 2048), ("host_copy", 1, 2 / 256),
     ("all_reduce", 1, 1 / 2)],
)  # fmt: skip
def test_a_call_that_stays_in_the_cache_measures_no_memory(
    what: str, enough: float, too_little: float
) -> None:
    assert row(what, edit=resized(what, enough)).outcome is Outcome.PASS
    says(row(what, edit=resized(what, too_little)), IMPOSSIBLE, "fills a GPU and leaves its cache")


def test_a_profile_of_gpus_has_to_say_what_is_possible() -> None:
    hardware = WHERE.profile.hardware.model_dump(mode="json")
    del hardware["peaks"]["host_copy"]
    with pytest.raises(ValidationError, match="host_copy is missing"):
        builder.with_profile(WHERE, hardware=hardware)
    hardware["peaks"] |= {"host_copy": {"value": 31.5, "source": "x"}, "warp": {"value": 9,
                          "source": "x"}}  # fmt: skip
    with pytest.raises(ValidationError, match="unknown warp"):
        builder.with_profile(WHERE, hardware=hardware)


def test_numbers_of_another_kind_of_device_are_no_evidence() -> None:
    def on_cpu(document: dict[str, Any]) -> None:
        document["ranks"][0]["device"]["type"] = "cpu"

    says(row("memory_copy", edit=on_cpu), WRONG, "was measured on cpu")


def _of(rank: int, what: str, **values: Any) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        document["ranks"][rank][what] |= values

    return edit


EDITS: dict[str, tuple[Edit, str]] = {
    "a rank is missing": (lambda d: d["ranks"].pop(), "tells of ranks [0]"),
    "a rank is there twice": (
        lambda d: d["ranks"].__setitem__(1, d["ranks"][0]),
        "tells of ranks [0, 0]",
    ),
    "another launch": (lambda d: d.update(run_token="f" * 32), "is of another launch"),
    "no ranks": (lambda d: d.update(ranks=[]), "no usable list"),
    "another world": (lambda d: d.update(world_size=4), "world_size 4"),
    "no number of rank 1": (lambda d: d["ranks"][1].update(matmul=None), "of rank 1 is missing"),
    "no number at all": (
        lambda d: [rank.update(matmul=None) for rank in d["ranks"]],
        "no rank measured matmul",
    ),
    "a time of 0": (_of(0, "matmul", seconds=[0.0] * 10), "took 0.0 s"),
    "a time below 0": (_of(0, "matmul", seconds=[0.1, 0.1, -0.1]), "took -0.1 s"),
    "two repeats": (_of(1, "matmul", seconds=[0.1, 0.1]), "2 repeats, 3 are needed"),
    "no times": (_of(1, "matmul", seconds=[]), "0 repeats"),
    "a size of 0": (_of(0, "matmul", size=0), "no usable size"),
    "another size": (_of(0, "matmul", size=9000), "its sizes and times give"),
    "another rate": (_of(0, "matmul", rate=300.0), "tells 300.0 TFLOP/s"),
    "another unit": (_of(0, "matmul", unit="GFLOP/s"), "GFLOP/s"),
    "faster than the host's clock": (_of(0, "matmul", host_s=1e-3), "by the host's clock"),
    "slower than the host's clock": (_of(0, "matmul", host_s=10.0), "by the host's clock"),
    "no host's clock": (_of(0, "matmul", host_s=None), "no usable host_s"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_document_that_does_not_agree_with_itself_is_damaged(name: str) -> None:
    edit, text = EDITS[name]
    says(row("matmul", edit=edit), DAMAGED, text)


def from_disk(tmp_path: Path, text: str) -> Check:
    """The row `matmul` where the file holds `text`."""
    found = preflight()
    made = found.launches["ceilings"]
    on_disk.write_launch(tmp_path, made)
    (tmp_path / made.launch.run_dir / CEILINGS_JSON).write_text(text)
    read = read_launch(tmp_path, made.launch, made.result)
    launches = {**found.launches, "ceilings": read}
    return builder.row("preflight", "matmul", replace(found, launches=launches), WHERE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "seconds has an unexpected value: 'nan'"),
        ("0.001", "seconds has an unexpected value: '0.001'"),
        (True, "seconds has an unexpected value: 'True'"),
    ],
)
def test_a_time_that_is_no_number_is_named(tmp_path: Path, value: Any, text: str) -> None:
    (made,) = (one for one in builder.PHASES["preflight"].plan(WHERE) if one.kind == "ceilings")
    document = ceiling_files.document(made, WHERE.profile)
    document["ranks"][1]["matmul"]["seconds"][3] = value
    says(from_disk(tmp_path, json.dumps(document)), DAMAGED, text)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"ranks": "x"}', "[" * 100_000])
def test_a_file_that_is_no_document_is_damaged(tmp_path: Path, text: str) -> None:
    says(from_disk(tmp_path, text), DAMAGED, "ceilings.json")


def test_no_file_is_no_evidence() -> None:
    found = builder.evidence(
        "preflight", WHERE, change=spoil.parts(ceilings=None), only=("ceilings",)
    )
    says(builder.row("preflight", "matmul", found, WHERE), NOTHING)


def mfu_row(earlier: dict[str, PhaseEvidence], where: PlanContext = WHERE, **speed: Any) -> Check:
    return answers.row("baseline", "mfu_of_ceiling", where=where, earlier=earlier, **speed)


def test_mfu_is_held_against_what_this_card_was_measured_with() -> None:
    # 1e5 tok/s of 5e8 FLOPs on two cards of 240 TFLOP/s.
    check = says(mfu_row({"preflight": preflight()}, rate=1e5), FINE)
    assert check.measurement is not None
    assert check.measurement.value == pytest.approx(1e5 * 5e8 / (2 * 240e12), rel=1e-3)
    paths = {source.path for source in check.measurement.sources}
    assert {"preflight/ceilings/ceilings.json", "baseline/run1/training.csv"} <= paths
    slow = says(mfu_row({"preflight": preflight()}, rate=5e4), TOO_LITTLE)
    assert slow.required
    # The same throughput on a card of half the speed is no fault of the settings.
    card = says(mfu_row({"preflight": preflight(matmul=120.0)}, rate=5e4), FINE)
    assert card.measurement.value == pytest.approx(2 * float(slow.measurement.value))


def test_without_preflight_in_this_run_there_is_no_share_of_it() -> None:
    check = says(mfu_row({}, rate=1e5), NOT_RUN, "preflight phase was not run in this run")
    assert "--phase preflight,baseline" in check.rerun


def test_on_cores_a_phase_alone_stays_as_it_was() -> None:
    """What never decides is no open question either."""
    where = builder.context("cpu")
    says(mfu_row({}, where), NOT_GATED, "was not run")


def test_more_than_the_card_can_is_not_plausible_and_another_card_not_comparable() -> None:
    check = says(mfu_row({"preflight": preflight(matmul=2.0)}, rate=1e5), IMPOSSIBLE)

    def elsewhere(document: dict[str, Any]) -> None:
        document["ranks"][1]["device"]["uuid"] = "7"

    check = mfu_row({"preflight": preflight(edit=elsewhere)}, rate=1e5)
    says(check, UNLIKE, "preflight measured 0, 7")
