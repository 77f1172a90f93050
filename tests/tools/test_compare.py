"""When two runs may be compared, and what follows."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.folder.manifest import write_manifest
from runbook.records import (
    Check,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Outcome,
    Reason,
    RunRecord,
    Verdict,
    judge_run,
)
from runbook.tools.compare import Comparison, compare_runs, comparison_lines
from runbook.tools.export import csv_text, numbers_of, prometheus_text
from tests.factory import records
from tests.factory.records import check
from tests.factory.tables import rows, table
from tests.reports import samples
from tests.reports.samples import run, throughput

(ENV,) = rows(__file__, "env")


def make_run(folder: Path, *, env: dict[str, object] | None = None, **fields: object) -> RunRecord:
    """A run with two baseline launches, written to `folder`."""
    entries = []
    for name in ("run0", "run1"):
        home = folder / "baseline" / name
        home.mkdir(parents=True)
        (home / "env.json").write_text(json.dumps(ENV | (env or {})))
        result = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token="a1b2")
        launch = records.launch("torchrun", name=name, steps=60)
        entries.append(LaunchEntry(launch=launch, result=result))
    check = throughput(10240.0, Outcome.PASS, Reason.OK, "measured")
    phase = records.phase("baseline", check, launches=tuple(entries))
    told = {"required": ("baseline.throughput",), "run_id": folder.name}
    record = run(Verdict.GO, (phase,), **(told | fields))
    (folder / "run.json").write_text(record.model_dump_json())
    write_manifest(folder)
    return record


def pair(folder: Path) -> tuple[RunRecord, RunRecord]:
    """Two equal runs."""
    a, b = (make_run(folder / name) for name in "ab")
    return a, b


def held(folder: Path, a: RunRecord, b: RunRecord) -> Comparison:
    return compare_runs(a, folder / "a", b, folder / "b")


def compare(folder: Path, **b: object) -> Comparison:
    """A run as it is against one with these differences."""
    return held(folder, make_run(folder / "a"), make_run(folder / "b", **b))  # type: ignore[arg-type]


def of_checks(run: RunRecord, *checks: Check) -> RunRecord:
    phase = run.phases[0].model_copy(update={"checks": checks})
    return run.model_copy(update={"phases": (phase,)})


def told(found: Comparison) -> str:
    return "\n".join(comparison_lines(found))


@table(__file__, "compared")
def test_one_thing_that_differs_is_named_and_compared(
    tmp_path: Path, changes: dict[str, object], kind: str, what: str
) -> None:
    found = compare(tmp_path, **changes)
    assert [(one.kind, one.what) for one in found.differences] == [(kind, what)]
    assert (found.obstacles, found.exit_code) == ((), 0)
    assert f"  {kind}  {what}: " in told(found)


@table(__file__, "obstacles")
def test_unlike_runs_are_not_compared(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    found = compare(tmp_path, **changes)
    assert any(reason in text for text in found.obstacles), found.obstacles
    assert found.exit_code == 3
    assert comparison_lines(found)[-1] == "NOT COMPARABLE"


def test_a_launch_without_env_json_and_a_changed_record_are_obstacles(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    (tmp_path / "b/baseline/run0/env.json").unlink()
    assert held(tmp_path, a, b).obstacles == ("no env.json on both sides for: baseline/run0",)
    assert (
        "the runs have no trainer launch in common"
        in held(tmp_path, a, b.model_copy(update={"phases": ()})).obstacles
    )
    (tmp_path / "b/run.json").write_text("{}")
    found = held(tmp_path, a, b)
    assert any("run.json of b is another file" in text for text in found.obstacles)
    assert found.b_said == "INCOMPLETE"


def test_a_required_check_that_failed_or_vanished_is_worse_one_not_asked_for_is_not(
    tmp_path: Path,
) -> None:
    a, b = pair(tmp_path)
    failed = throughput(1.0, Outcome.FAIL, Reason.BELOW_LIMIT, "measured")
    skipped = {"outcome": Outcome.SKIPPED, "code": Reason.NOT_ASKED_FOR, "follows": "baseline"}
    left_out = b.phases[0].checks[0].model_copy(update=skipped)
    for row, change in ((failed, "FAIL"), (None, "no row")):
        found = held(tmp_path, a, of_checks(b, *([row] if row else [])))
        assert f"baseline.throughput (required)  PASS -> {change}" in told(found)
        assert (found.exit_code, comparison_lines(found)[-1]) == (1, "B is worse than A")
    assert held(tmp_path, a, of_checks(b, left_out)).checks == ()


def test_what_a_verdict_leaves_out_is_said_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare(tmp_path, caveats=("steps x 0.02",))
    assert comparison_lines(found)[:2] == ["A  a  GO", "B  b  GO, steps x 0.02"]
    assert main(["history", "--out", str(tmp_path)]) == 0
    listed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.endswith("steps x 0.02") for line in listed] == [False, False, True]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, **rows(__file__, "compared")[0]["changes"])
    words = ["compare", "a", "b", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "B is not shown to be worse than A" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["comparable"]) == (5, True)
    assert main(["compare", "a", "nothing", "--out", str(tmp_path)]) == 2


parser = pytest.importorskip(
    "prometheus_client.parser", reason="prometheus-client is not installed (extra dev)"
)


def read(record: RunRecord) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels."""
    found = {}
    for family in parser.text_string_to_metric_families(prometheus_text(record)):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(record: RunRecord, name: str, /, **labels: str) -> float:
    """The one sample of this name with these labels among its own."""
    wanted = set(labels.items())
    (found,) = [
        number for (key, own), number in read(record).items() if key == name and wanted <= own
    ]
    return found


def test_each_required_check_is_there() -> None:
    record = samples.no_go()
    passed = {name: value(record, "runbook_required_check_passed", check=name)
              for name in record.required}  # fmt: skip
    assert passed["baseline.throughput"] == 0 and passed["long_run.no_halt"] == 1
    cut = samples.incomplete()
    assert value(cut, "runbook_required_check_passed", check="long_run.no_halt") == 0


def test_a_required_check_is_passed_where_the_verdict_says_so() -> None:
    """A first run has no accepted one to compare with, and is GO all the same."""

    def passed(code: Reason) -> tuple[float, Verdict]:
        name = "baseline.accepted"
        row = samples.baseline(check(name, Outcome.SKIPPED, code, required=True))
        record = samples.run(Verdict.GO, (row,), required=(name,))
        told = value(record, "runbook_required_check_passed", check=name)
        return told, judge_run(record.checks(), record.required)

    assert passed(Reason.NO_ACCEPTED_RUN) == (1.0, Verdict.GO)
    assert passed(Reason.NEEDS_CUDA) == (0.0, Verdict.INCOMPLETE)


def test_numbers_limits_and_the_end() -> None:
    record = samples.go()
    assert value(record, "runbook_value", name="baseline.throughput", unit="tok/s") == 47.25
    assert value(record, "runbook_limit", name="baseline.throughput", comparator=">=") == 39
    assert value(record, "runbook_end_timestamp_seconds") == 1795227300
    running = record.model_copy(update={"finished_at": None})
    names = {name for name, _ in read(running)}
    assert "runbook_end_timestamp_seconds" not in names and "runbook_verdict" in names


def test_csv_has_each_number_in_full_and_its_run() -> None:
    record = samples.no_go()
    rows = list(csv.DictReader(io.StringIO(csv_text(numbers_of(record)))))
    assert [row["name"] for row in rows] == [one.name for one in numbers_of(record)]
    first, whole = rows[0], asdict(numbers_of(record)[0])
    assert (first["run_id"], first["verdict"]) == (record.run_id, "NO-GO")
    assert float(first["low"]) == whole["low"]
    assert (first["required"], first["limit"]) == ("yes", "39.0")
    assert rows[-1]["limit"] == rows[-1]["outcome"] == ""
