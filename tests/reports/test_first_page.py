"""report.md is short whatever happened, and says what counts in a fixed order."""

from __future__ import annotations

import re
import subprocess

import pytest
from markupsafe import escape

from reports.key_numbers import KEYS
from reports.summary import TABLE_PHASES, exports_text, summarize
from reports.view import build_view
from runbook import registry
from runbook.config.load import load_profile, profile_names
from runbook.engine.outputs import render
from runbook.records import Check, Comparator, Outcome, Reason, RunRecord, Verdict
from tests.phases.test_node_scaling import where
from tests.reports.records import NAMES, record_called
from tests.reports.samples import go, measured, no_go, sweep

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
    known |= {check for phase in registry.phases().values() for check in phase.check_ids(where(4))}
    assert {key.check for key in KEYS} <= known
    assert set(TABLE_PHASES) <= set(registry.phases())


def test_what_was_not_measured_is_one_line_and_takes_no_tile() -> None:
    summary = summarize(build_view(go()))
    assert [tile.label for tile in summary.tiles[:1]] == ["Throughput"]
    assert all(tile.value for tile in summary.tiles)
    lacking = "Scaling efficiency, Peak memory of a rank in this run"
    assert summary.unmeasured == f"Not measured: {lacking}."
    assert "Scaling" not in {number.label for number in summary.numbers}


def test_one_rank_alone_has_no_scaling_to_be_missed() -> None:
    record = go()
    alone = {**record.profile_document, "ranks": 1}
    summary = summarize(build_view(record.model_copy(update={"profile_document": alone})))
    assert summary.unmeasured == "Not measured: Peak memory of a rank in this run."


def with_memory(*, gated: bool = True) -> RunRecord:
    """A GO whose long run projects 2 GiB at the end, under a limit of 8 GiB."""
    record = go()
    long_run = record.phases[-1]
    base = {"phase": "long_run", "question": "?", "outcome": Outcome.PASS, "code": Reason.OK}
    projected = measured(
        2048.0, "MiB projected", "long_run/run/heartbeat_rank0.jsonl", name="memory_projected",
        interval=(1024.0, 3072.0),
    )  # fmt: skip
    plateau = Check.model_validate(
        {**base, "id": "long_run.memory_plateau", "reason": "flat", "measurement": projected}
    )
    peak = measured(1.5, "GiB", "long_run/run/heartbeat_rank0.jsonl", name="peak_memory")
    held = {"comparator": Comparator.BELOW, "limit": 8.0, "limit_source": "here"}
    shown_only = {"outcome": Outcome.SKIPPED, "code": Reason.NOT_GATED}
    bound = Check.model_validate(
        {**base, **({} if gated else shown_only), **held, "id": "long_run.memory_limit",
         "reason": "under", "measurement": peak}
    )  # fmt: skip
    phase = long_run.model_copy(update={"checks": (plateau, bound)})
    document = {**record.profile_document, "workload": {"production_steps": 50_000}}
    phases = (*record.phases[:-1], phase)
    return record.model_copy(update={"phases": phases, "profile_document": document})


def test_projected_memory_stands_beside_its_limit_in_one_unit() -> None:
    record = with_memory()
    numbers = {one.id: one for one in summarize(build_view(record)).numbers}
    found = numbers["long_run.memory_plateau"]
    assert found.label == "Projected memory of a rank at step 50,000"
    assert (found.value, found.interval, found.limit) == ("2 GiB", "1 to 3", "< 8 GiB")
    assert found.limit == numbers["long_run.memory_limit"].limit
    assert f"<p>1 to 3; limit {escape(found.limit)}</p>" in render(record, "html")


def test_projected_memory_has_no_limit_where_none_decides() -> None:
    found = {one.id: one for one in summarize(build_view(with_memory(gated=False))).numbers}
    assert found["long_run.memory_plateau"].limit == ""
    bare = with_memory().model_copy(update={"profile_document": {}})
    labels = {one.label for one in summarize(build_view(bare)).numbers}
    assert "Projected memory of a rank at the end of production" in labels


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


def test_the_two_tables_of_the_documents_are_there_in_their_shape() -> None:
    (table,) = summarize(build_view(go())).tables
    assert table.columns == ("bucket (MB)", "last-50 mean", "last-50 stdev", "n", "window")
    assert table.rows[1] == ("50 MB", "48.4", "0.92", "50", "steps 151-200")
    assert table.path == "bucket_sweep/arms/training.csv"
    fused = sweep().model_copy(update={"name": "fused_adamw"})
    both = go().model_copy(update={"phases": (sweep(), fused)})
    assert len(summarize(build_view(both)).tables) == 2


def test_the_facts_name_machine_software_and_commit() -> None:
    facts = dict(summarize(build_view(no_go())).facts)
    assert facts["Machine"] == "2 x NVIDIA A100 80GB PCIe, 504 GiB memory"
    assert facts["Software"] == "torch 2.13.0, runbook 0.1.0"
    assert facts["Commit"] == "840303b8eaea on main, clean"
    assert facts["Set by hand"] == "NSA_PREFILL_BATCHED=0 (--set)"


def test_what_the_headline_counts_is_listed_with_the_configuration() -> None:
    steps = "baseline.steps=20, baseline.launches=2, long_run.steps=60, nvtx.steps=5"
    record = go().model_copy(update={"caveats": (f"fewer steps ({steps})",)})
    assert record.said == "GO, fewer steps (4 settings)"
    assert dict(summarize(build_view(record)).facts)["Fewer steps"] == steps
    page = render(record, "html")
    assert "fewer steps (4 settings)</span>" in page and steps in page


def test_a_bare_yes_or_no_says_of_what() -> None:
    record = go()
    check = record.phases[0].checks[0]
    assert check.measurement is not None
    fact = check.measurement.model_copy(update={"name": "git.dirty", "value": False})
    bare = {"measurement": fact, "comparator": Comparator.NONE, "limit": None}
    phase = record.phases[0].model_copy(update={"checks": (check.model_copy(update=bare),)})
    (row,) = build_view(record.model_copy(update={"phases": (phase,)})).phases[0].rows
    assert row.value == "git.dirty: no"


def test_no_line_of_the_first_page_breaks_inside_an_item() -> None:
    for fmt in ("md", "details"):
        text = render(no_go(), fmt)
        assert "\n\n\n" not in text and "\n)" not in text, fmt
        assert re.search(r"`[^`\n]* and \d+ more`", text) is None, "a count is no file"


def test_the_first_copied_command_is_the_next_one() -> None:
    page = render(no_go(), "html")
    copied = re.findall(r'data-copy="([\w-]+)"', page)
    assert copied[0] == "next-1" and "whole" in copied
    assert all(name.startswith(("next-", "reproduce-", "whole")) for name in copied)
    assert 'data-copy="production"' in render(go(), "html")


def test_a_number_of_a_phase_that_was_not_asked_for_is_skipped_and_not_missing() -> None:
    record = go()
    asked = [one for one in record.phases if one.name != "single_gpu"]
    left = record.phases[0].model_copy(
        update={"name": "single_gpu", "outcome": Outcome.SKIPPED, "checks": ()}
    )
    summary = summarize(build_view(record.model_copy(update={"phases": (*asked, left)})))
    assert summary.unmeasured.endswith(" Not asked for: Scaling efficiency.")


def test_many_settings_share_lines_that_a_shell_takes() -> None:
    """Twelve variables in a few lines, read back by a real shell."""
    chosen = {f"NSA_NUMBER_{number:02}": f"value {number}" for number in range(12)}
    text = exports_text(go().model_copy(update={"exports": chosen}))
    lines = text.splitlines()
    assert len(lines) < 12 and all(len(line) <= 100 for line in lines)
    told = subprocess.run(
        ["sh", "-c", f"{text}\nenv"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {f"{name}={value}" for name, value in chosen.items()} <= set(told)
