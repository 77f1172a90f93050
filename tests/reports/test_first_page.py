"""report.md is short whatever happened, and says what counts in a fixed order."""

from __future__ import annotations

import re

import pytest

from reports.key_numbers import KEYS
from reports.summary import TABLE_PHASES, summarize
from reports.view import build_view
from runbook.config import registry
from runbook.config.load import load_profile, profile_names
from runbook.engine.derive import render
from runbook.records import RunRecord, Verdict
from tests.phases import builder
from tests.reports.records import NAMES, record_called
from tests.reports.samples import go, measured, no_go

LINES_OF_A_GO = 80
LINES_OF_A_FAILURE = 120
ORDER = (
    "**Verdict: ",
    "## What failed and what to do",
    "## Settings ",
    "## The numbers",
    "## Machine and configuration",
    "## Phases",
    "details.md",
)


def page_of(record: RunRecord) -> list[str]:
    return render(record, "md").splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_the_first_page_is_short(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    record = record_called(tmp_path_factory, name)
    lines = page_of(record)
    assert len(lines) <= (LINES_OF_A_GO if record.verdict is Verdict.GO else LINES_OF_A_FAILURE)
    text = "\n".join(lines)
    good = record.verdict is Verdict.GO
    titles = [title for title in ORDER[:-1] if not (good and "What failed" in title)]
    places = [text.index(title) for title in titles] + [text.rindex(ORDER[-1])]
    assert places == sorted(places)


def test_any_number_of_causes_fits() -> None:
    """Causes beyond the first few get a line each, and what is left is counted."""
    record = no_go()
    phase = record.phases[1]
    check = phase.checks[0]
    many = tuple(
        check.model_copy(
            update={"id": f"baseline.row{n}", "reason": f"it is {n}", "evidence": (f"f{n}.csv",)}
        )
        for n in range(60)
    )
    changed = record.model_copy(update={"phases": (phase.model_copy(update={"checks": many}),)})
    causes = len(build_view(changed).causes)
    lines = page_of(changed)
    assert len(lines) <= LINES_OF_A_FAILURE
    left = re.search(r"and (\d+) more causes", "\n".join(lines))
    told = sum(re.match(r"### \d+\. |- FAIL: ", line) is not None for line in lines)
    assert causes == told + (int(left[1]) if left else 0)


def test_every_number_and_table_is_of_a_check_that_there_is() -> None:
    known = {
        check for name in profile_names() for check in registry.known_checks(load_profile(name))
    }
    where = builder.on_nodes(4)
    known |= {check for phase in registry.phases().values() for check in phase.check_ids(where)}
    assert {key.check for key in KEYS} <= known
    assert set(TABLE_PHASES) <= set(registry.phases())


def planned_launch() -> RunRecord:
    """A launch by a plan: its own phase `smoke` has throughput, gates and the selection."""
    record, phase = go(), no_go().phases[1]
    rate = phase.checks[0].model_copy(update={"id": "smoke.throughput", "phase": "smoke"})
    entropy = measured(0.99, "", "smoke/run/gates.csv", name="gate_entropy_min")
    gates = rate.model_copy(update={"id": "smoke.gates", "measurement": entropy})
    selection = (
        measured(12.25, "blocks", "smoke/run/gates.csv", name="sel_blocks_mean", n=15),
        measured(0.25, "share", "smoke/run/gates.csv", name="sel_forced_share", n=15),
    )
    smoke = phase.model_copy(
        update={"name": "smoke", "checks": (rate, gates), "measurements": selection}
    )
    document = {**record.profile_document, "phases": {"smoke": {"stage": {"order": 1}}}}
    return record.model_copy(update={"phases": (smoke,), "profile_document": document})


def test_a_launch_by_a_plan_has_its_own_numbers_and_the_health_of_the_selection() -> None:
    """Requirement G10; a number that decides nothing says so."""
    record = planned_launch()
    found = {one.label: one for one in summarize(build_view(record)).numbers}
    assert found["Throughput"].id == "smoke.throughput" and found["Throughput"].limit
    blocks, forced = found["Blocks that a query attends to"], found["Forced part of these blocks"]
    assert (blocks.value, blocks.basis, blocks.limit, blocks.gated) == (
        "12.25 blocks",
        "n=15",
        "",
        False,
    )
    assert forced.value == "25 %"
    assert "| Blocks that a query attends to | 12.25 blocks | - | - | not gated |" in render(
        record, "md"
    )
    bare = record.phases[0].model_copy(update={"measurements": ()})
    without = summarize(build_view(record.model_copy(update={"phases": (bare,)}))).numbers
    assert {"Throughput", "Lowest gate entropy"} <= {one.label for one in without}
    assert not {"Blocks that a query attends to"} & {one.label for one in without}


def test_what_the_headline_counts_is_listed_with_the_configuration() -> None:
    steps = "baseline.steps=20, baseline.launches=2, long_run.steps=60, nvtx.steps=5"
    record = go().model_copy(update={"caveats": (f"fewer steps ({steps})",)})
    assert record.said == "GO, fewer steps (4 settings)"
    assert dict(summarize(build_view(record)).facts)["Fewer steps"] == steps
    page = render(record, "html")
    assert "fewer steps (4 settings)</span>" in page and steps in page
