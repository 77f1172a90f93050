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
from tests.phases import answers, builder, machine_files, traces
from tests.phases.answers import (
    DAMAGED,
    FINE,
    IMPOSSIBLE,
    MACHINE,
    NEEDS_CUDA,
    NOT_GATED,
    NOT_RUN,
    NOTHING,
    TOO_LITTLE,
    UNLIKE,
    WHERE,
    says,
)

ROWS = ("matmul", "memory_copy", "host_copy", "all_reduce")
NEEDS_GPUS = (Outcome.SKIPPED, Reason.NEEDS_GPUS)
CPU = builder.context("cpu")
Edit = Callable[[dict[str, Any]], object]


def preflight(where: PlanContext = WHERE, edit: Edit | None = None, **rates: float) -> Any:
    """Preflight with these rates on every rank; `edit` changes the document."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        document = machine_files.document(made.launch, where.profile, **rates)
        if edit:
            edit(document)
        return replace(made, ceilings=document)

    return builder.evidence("preflight", where, change=change, only=("ceilings",))


def row(what: str, where: PlanContext = WHERE, edit: Edit | None = None, **rates: float) -> Check:
    return builder.row("preflight", what, preflight(where, edit, **rates), where)


# Of a profile, in the order of ROWS: rates of a sick machine (half the clock, half the memory
# clock, half the width of the link, NCCL over the host), and what the specification allows.
RATES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "a100x2_pcie4": ((156.0, 820.0, 13.0, 5.0), (312.0, 1935.0, 31.5, 31.5)),
    "h100x2_nvlink": ((490.0, 1500.0, 27.0, 25.0), (1070.0, 3350.0, 63.0, 450.0)),
    "h200x1": ((490.0, 2150.0, 27.0, None), (1070.0, 4800.0, 63.0, None)),
}


@pytest.mark.parametrize("index", range(4), ids=ROWS)
@pytest.mark.parametrize("name", RATES)
def test_a_sick_card_or_link_is_the_environments_fault(name: str, index: int) -> None:
    """And more than the specification allows was not measured."""
    where, what = builder.context(name), ROWS[index]
    rate, most = (rates[index] for rates in RATES[name])
    if rate is None:
        says(row(what, where), NEEDS_GPUS)
        return
    check = says(row(what, where, **{what: rate}), MACHINE, "not a setting")
    assert check.required
    assert check.measurement.value == pytest.approx(rate)
    assert check.measurement.path == "preflight/ceilings/ceilings.json"
    says(row(what, where, **{what: 1.02 * most}), FINE)
    for share in (1.04, 20.0):
        words = f"1.03 times the {most:g} that are possible"
        says(row(what, where, **{what: share * most}), IMPOSSIBLE, words, remedy="hardware.peaks")


def slower_on(rank: int, what: str, share: float) -> Edit:
    """One rank reaches this share of what the document says of it, in all three of its sources."""

    def edit(document: dict[str, Any]) -> None:
        one = document["ranks"][rank][what] = dict(document["ranks"][rank][what])
        one["seconds"] = [second / share for second in one["seconds"]]
        one["host_s"] /= share
        one["rate"] *= share

    return edit


def of(rank: int | None, **values: Any) -> Edit:
    """Other values of the products of one rank, or of every one."""
    return lambda document: [
        one["matmul"].update(values) for one in document["ranks"] if rank in (None, one["rank"])
    ]


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


SLOW = machine_files.measured(Ceiling.MATMUL, 100.0)
IN_CACHE = "fills a GPU and leaves its cache"


@pytest.mark.parametrize(("what", "edit", "wanted", "words"), [
    # A card above its floor that falls behind the other is named; the slowest rank decides.
    *((what, slower_on(rank, what, 0.83), MACHINE, (f"on rank {rank} ", "83% of the fastest"))
      for what in ("matmul", "memory_copy") for rank in (0, 1)),
    ("matmul", slower_on(0, "matmul", 0.92), FINE, ()),
    ("memory_copy", slower_on(1, "memory_copy", 0.92), FINE, ()),
    ("matmul", lambda d: d["ranks"][1].update(matmul=SLOW), MACHINE,
     ("100 TFLOP/s on rank 1 (A100, 1), the slowest of 2", "the fastest has 240")),
    ("matmul", of(None, dtype="fp8"), IMPOSSIBLE, ("the profile trains in bf16",)),
    ("memory_copy", lambda d: d["ranks"][0]["device"].update(type="cpu"), MACHINE,
     ("was measured on cpu",)),
    # A call that stays in the cache measures no memory.
    *((what, resized(what, share), FINE, ()) for what, share in
      (("matmul", 1 / 2), ("memory_copy", 1 / 8), ("host_copy", 1), ("all_reduce", 1))),
    *((what, resized(what, share), IMPOSSIBLE, (IN_CACHE,)) for what, share in
      (("matmul", 1 / 4), ("memory_copy", 2 / 2048), ("host_copy", 2 / 256),
       ("all_reduce", 1 / 2))),
    # A document that does not agree with itself is damaged.
    ("matmul", lambda d: d["ranks"].pop(), DAMAGED, ("tells of ranks [0]",)),
    ("matmul", lambda d: d["ranks"].__setitem__(1, d["ranks"][0]), DAMAGED, ("of ranks [0, 0]",)),
    ("matmul", lambda d: d.update(run_token="f" * 32), DAMAGED, ("is of another launch",)),
    ("matmul", lambda d: d.update(ranks=[]), DAMAGED, ("no usable list",)),
    ("matmul", lambda d: d.update(world_size=4), DAMAGED, ("world_size 4",)),
    ("matmul", lambda d: d["ranks"][1].update(matmul=None), DAMAGED, ("of rank 1 is missing",)),
    ("matmul", lambda d: [rank.update(matmul=None) for rank in d["ranks"]], DAMAGED,
     ("no rank measured matmul",)),
    ("matmul", of(0, seconds=[0.0] * 10), DAMAGED, ("took 0.0 s",)),
    ("matmul", of(0, seconds=[0.1, 0.1, -0.1]), DAMAGED, ("took -0.1 s",)),
    ("matmul", of(1, seconds=[0.1, 0.1]), DAMAGED, ("2 repeats, 3 are needed",)),
    ("matmul", of(1, seconds=[]), DAMAGED, ("0 repeats",)),
    ("matmul", of(0, size=0), DAMAGED, ("no usable size",)),
    ("matmul", of(0, size=9000), DAMAGED, ("its sizes and times give",)),
    ("matmul", of(0, rate=300.0), DAMAGED, ("tells 300.0 TFLOP/s",)),
    ("matmul", of(0, unit="GFLOP/s"), DAMAGED, ("GFLOP/s",)),
    ("matmul", of(0, host_s=1e-3), DAMAGED, ("by the host's clock",)),
    ("matmul", of(0, host_s=10.0), DAMAGED, ("by the host's clock",)),
    ("matmul", of(0, host_s=None), DAMAGED, ("no usable host_s",)),
])  # fmt: skip
def test_what_a_document_of_other_numbers_is(
    what: str, edit: Edit, wanted: Any, words: tuple[str, ...]
) -> None:
    says(row(what, edit=edit), wanted, *words)


def test_on_shared_cores_every_number_is_shown_and_none_decides() -> None:
    for what in ("matmul", "memory_copy", "all_reduce"):
        check = says(row(what, CPU, **{what: 1e-6}), NOT_GATED)
        assert check.measurement and not check.required
    says(row("host_copy", CPU), NEEDS_CUDA)


def test_a_profile_of_gpus_has_to_say_what_is_possible() -> None:
    hardware = WHERE.profile.hardware.model_dump(mode="json")
    peak = hardware["peaks"].pop("host_copy")
    with pytest.raises(ValidationError, match="host_copy is missing"):
        builder.with_profile(WHERE, hardware=hardware)
    hardware["peaks"] |= {"host_copy": peak, "warp": peak}
    with pytest.raises(ValidationError, match="unknown warp"):
        builder.with_profile(WHERE, hardware=hardware)


def of_rank_1(third: Any) -> str:
    """The file in which the third time of rank 1 is another value."""
    (made,) = (one for one in builder.PHASES["preflight"].plan(WHERE) if one.kind == "ceilings")
    document = machine_files.document(made, WHERE.profile)
    document["ranks"][1]["matmul"]["seconds"][3] = third
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (of_rank_1(value), f"seconds has an unexpected value: '{value}'")
            for value in (float("nan"), "0.001", True)
        ),
        *(
            (text, "ceilings.json")
            for text in ("", "[]", "{", "null", '{"ranks": "x"}', "[" * 100_000)
        ),
    ],
    ids=range(9),
)
def test_a_file_that_is_no_document_is_damaged(tmp_path: Path, text: str, words: str) -> None:
    found = preflight()
    made = found.launches["ceilings"]
    traces.write_launch(tmp_path, made)
    (tmp_path / made.launch.run_dir / CEILINGS_JSON).write_text(text)
    read = read_launch(tmp_path, made.launch, made.result)
    launches = {**found.launches, "ceilings": read}
    says(
        builder.row("preflight", "matmul", replace(found, launches=launches), WHERE), DAMAGED, words
    )


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


def elsewhere(document: dict[str, Any]) -> None:
    document["ranks"][1]["device"]["uuid"] = "7"


@pytest.mark.parametrize(
    ("earlier", "where", "wanted", "words"),
    [
        ({}, WHERE, NOT_RUN, "preflight phase was not run in this run"),
        # On cores a phase alone stays as it was: what never decides is no open question either.
        ({}, CPU, NOT_GATED, "was not run"),
        # More than the card can is not plausible, and another card not comparable.
        ({"preflight": preflight(matmul=2.0)}, WHERE, IMPOSSIBLE, ""),
        ({"preflight": preflight(edit=elsewhere)}, WHERE, UNLIKE, "preflight measured 0, 7"),
    ],
)
def test_without_ceilings_of_these_devices_there_is_no_share_of_them(
    earlier: dict[str, PhaseEvidence], where: PlanContext, wanted: Any, words: str
) -> None:
    check = says(mfu_row(earlier, where, rate=1e5), wanted, words)
    assert wanted is not NOT_RUN or "--phase preflight,baseline" in check.rerun


def test_no_file_is_no_evidence() -> None:
    without = answers.row("preflight", "matmul", lambda made: replace(made, ceilings=None))
    says(without, NOTHING)
