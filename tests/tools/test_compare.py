"""When two runs may be compared, and what follows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.console import Console
from runbook.engine.judge import missing_row
from runbook.folder.manifest import write_manifest
from runbook.records import (
    Check,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Verdict,
)
from runbook.tools.compare import Comparison, compare_runs, comparison_lines
from tests.factory import records
from tests.factory.files import HEADER, write_beats, write_rows
from tests.reports.samples import run, throughput
from tests.tools.inspect.folders import beats, row

SAME = [0.050, 0.051, 0.049]
NEW_CODE: dict[str, object] = {"git": {"sha": "aa84eda", "dirty": False, "diff_sha256": ""}}
GPUS: dict[str, object] = {"device": {"type": "cuda", "name": "NVIDIA A100", "count": 2}}
NEW_TORCH: dict[str, object] = {"versions": {"python": "3.11.7", "torch": "2.14.0"}}


def pair(folder: Path) -> tuple[RunRecord, RunRecord]:
    """Two equal runs, written to `folder`."""
    a, b = (make_run(folder / name, run_id=name, dts=SAME) for name in "ab")
    return a, b


def held(folder: Path, a: RunRecord, b: RunRecord) -> Comparison:
    return compare_runs(a, folder / "a", b, folder / "b")


def of_checks(run: RunRecord, *checks: Check) -> RunRecord:
    phase = run.phases[0].model_copy(update={"checks": checks})
    return run.model_copy(update={"phases": (phase,)})


def compare(
    tmp_path: Path,
    dts: list[float],
    *,
    reference: list[float] | None = None,
    env: dict[str, object] | None = None,
    base: dict[str, object] | None = None,
    outcome: Outcome = Outcome.PASS,
    **fields: object,
) -> Comparison:
    a = make_run(tmp_path / "a", run_id="a", dts=reference or SAME, env=base)
    b = make_run(
        tmp_path / "b",
        run_id="b",
        dts=dts,
        env=(base or {}) | (env or {}),
        outcome=outcome,
        **fields,
    )
    return held(tmp_path, a, b)


def test_new_code_at_the_same_speed_is_not_worse(tmp_path: Path) -> None:
    found = compare(tmp_path, [0.0501, 0.0509, 0.0491], env=NEW_CODE)
    assert found.comparable
    assert [(one.kind, one.what) for one in found.differences] == [("code", "git.sha (3 launches)")]
    assert found.speeds[0].decision.outcome.value == "PASS"
    assert found.speeds[0].ratio == pytest.approx(1.0, abs=0.005)
    assert found.exit_code == 0


@pytest.mark.parametrize(
    ("base", "by", "code", "says"),
    [
        (GPUS, 1.02, 0, "within noise"),
        (GPUS, 1.10, 3, "suspected"),
        (GPUS, 1.30, 1, "slower"),
        (GPUS, 0.70, 0, "faster"),
        ({}, 1.30, 0, "within noise"),
        ({}, 2.02, 3, "suspected"),
        ({}, 3.00, 1, "slower"),
    ],
)
def test_a_loss_is_shown_where_it_is_beyond_what_such_machines_do(
    tmp_path: Path, base: dict[str, object], by: float, code: int, says: str
) -> None:
    spread = [0.049, 0.0525, 0.0485]
    found = compare(tmp_path, [by * dt_s for dt_s in spread], base=base, env=NEW_CODE)
    assert (found.speeds[0].says, found.exit_code) == (says, code)
    assert found.speeds[0].ratio == pytest.approx(1 / by, rel=0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_few_launches_are_enough_where_the_loss_is_two_thirds(tmp_path: Path, count: int) -> None:
    found = compare(
        tmp_path, [3 * dt_s for dt_s in SAME[:count]], reference=SAME[:count], env=NEW_CODE
    )
    assert found.exit_code == 1
    assert "B is worse than A" in "\n".join(comparison_lines(found))


def test_what_only_one_of_them_ran_is_named_and_not_counted(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    not_run = missing_row("long_run.steady", code=Reason.NOT_RUN, reason="not asked", remedy="run")
    absent = PhaseRecord(
        name="long_run", title="", source="", outcome=Outcome.INCOMPLETE, checks=(not_run,)
    )
    passed = not_run.model_copy(update={"outcome": Outcome.PASS, "code": Reason.OK})
    whole = absent.model_copy(update={"checks": (passed,), "started_at": "2026-11-21T01:02:03Z"})
    required = ("baseline.throughput", "long_run.steady")
    full = a.model_copy(update={"phases": (*a.phases, whole), "required": required})
    part = b.model_copy(update={"phases": (*b.phases, absent), "required": required})
    found = held(tmp_path, full, part)
    assert (found.only_a, found.only_b) == (("long_run",), ())
    assert [check.id for check in found.checks] == ["baseline.throughput"]
    assert found.exit_code == 0
    assert "only A ran: long_run" in "\n".join(comparison_lines(found))


def measured(value: float, low: float | None, high: float | None) -> Check:
    check = throughput(value, Outcome.PASS, Reason.OK, "measured")
    interval = None if low is None or high is None else (low, high)
    measurement = check.measurement.model_copy(update={"interval": interval})
    return check.model_copy(update={"measurement": measurement})


def test_numbers_of_equal_outcomes_are_told_where_they_differ_and_a_name_stays_on_its_line(
    tmp_path: Path,
) -> None:
    a, b = pair(tmp_path)
    same, other = measured(40, 39, 41), measured(42, 41, 43)
    named = [one.model_copy(update={"id": "baseline.a\nb"}) for one in (same, other)]
    found = held(tmp_path, of_checks(a, same, named[0]), of_checks(b, same, named[1]))
    out = io.StringIO()
    lines = comparison_lines(replace(found, a="run\x1b[2J\nGO"))
    Console(stdout=out, stderr=out).tell({}, lines)
    told = out.getvalue().splitlines()
    assert told[0] == "A  run\\x1b[2J\\nGO  GO"
    at = told.index("numbers: 1 equal, 1 others")
    assert told[at + 1] == "  baseline.a\\nb"
    assert told[at + 2].startswith("    A  40 ") and told[at + 3].startswith("    B  42 ")


def test_the_load_of_the_launches_is_shown_for_both(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    told = "other work took 25.0% of 2 CPUs, the host 5.0%; load average up to 2.5"
    b = b.model_copy(update={"environment": {**b.environment, "load.baseline": told}})
    found = held(tmp_path, a, b)
    assert found.loads == (("launches of baseline", "not recorded", told),)
    assert "launches of baseline: not recorded -> other work" in "\n".join(comparison_lines(found))


def test_the_load_that_preflight_saw_is_shown(tmp_path: Path) -> None:
    found = compare(tmp_path, SAME, env=NEW_CODE, environment={"host.load_per_cpu": "0.9"})
    assert found.loads == (("host.load_per_cpu", "not recorded", "0.9"),)


def test_a_required_check_that_no_longer_passes_is_worse(tmp_path: Path) -> None:
    found = compare(tmp_path, SAME, env=NEW_CODE, outcome=Outcome.FAIL)
    assert [check.id for check in found.checks if check.worse] == ["baseline.throughput"]
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"effective": {"seq_len": 128}}, "seq_len"),
        ({"config_sha256": "d" * 64}, "config_sha256"),
        ({"world_size": 1}, "world_size"),
        ({**NEW_CODE, **NEW_TORCH}, "more than one thing differs: code, software"),
    ],
)
def test_unlike_runs_are_not_compared(tmp_path: Path, env: dict[str, object], reason: str) -> None:
    found = compare(tmp_path, [0.1, 0.1, 0.1], env=env, outcome=Outcome.FAIL)
    assert any(reason in text for text in found.obstacles), found.obstacles
    assert found.speeds[0].decision is None
    assert found.exit_code == 3
    assert found.conclusion == comparison_lines(found)[-1] == "NOT COMPARABLE"
    assert "undecided" not in "\n".join(comparison_lines(found))


def test_another_toggle_alone_is_one_cause(tmp_path: Path) -> None:
    toggles = [{"name": "NSA_DDP_BUCKET_MB", "value": "25", "default": "25", "source": "env"}]
    found = compare(tmp_path, SAME, env={"toggles": toggles})
    assert found.comparable
    assert [(d.kind, d.a, d.b) for d in found.differences] == [("toggles", "50", "25")]


def test_a_setting_is_a_toggle_or_part_of_the_work(tmp_path: Path) -> None:
    found = compare(tmp_path, SAME, settings={"NSA_DDP_BUCKET_MB": "25", "train.lr": "1"})
    told = {(one.kind, one.what) for one in found.differences}
    assert told == {("toggles", "NSA_DDP_BUCKET_MB"), ("work", "train.lr")}


def test_another_profile_or_an_unfinished_run_is_an_obstacle(tmp_path: Path) -> None:
    other = compare(tmp_path / "x", SAME, profile="cpu")
    assert any("profile" in text for text in other.obstacles)
    cut = compare(tmp_path / "y", SAME, finished_at=None)
    assert any("did not complete" in text for text in cut.obstacles)


def test_a_launch_without_env_json_or_with_mixed_rows_counts_for_nothing(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    log = tmp_path / "b" / "baseline" / "run1" / "training.csv"
    log.write_text(log.read_text() + log.read_text().partition("\n")[2])
    found = held(tmp_path, a, b)
    assert found.speeds[0].launches == ("run0", "run2")
    (tmp_path / "b" / "baseline" / "run0" / "env.json").unlink()
    found = held(tmp_path, a, b)
    assert found.obstacles == ("no env.json on both sides for: baseline/run0",)


def test_a_check_that_vanished_is_shown_and_worse(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    found = held(tmp_path, a, of_checks(b))
    assert "baseline.throughput (required)  PASS -> no row" in "\n".join(comparison_lines(found))
    assert found.exit_code == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, SAME, env=NEW_CODE)
    words = ["compare", "a", "b", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "B is not shown to be worse than A" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["comparable"]) == (3, True)
    assert document["speeds"][0]["decision"]["outcome"] == "PASS"
    assert main(["compare", "a", "nothing", "--out", str(tmp_path)]) == 2


def test_what_one_run_was_not_asked_for_is_no_change(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    told = {"outcome": Outcome.SKIPPED, "code": Reason.NOT_ASKED_FOR, "follows": "baseline"}
    rows = [check.model_copy(update=told) for check in b.phases[0].checks]
    assert held(tmp_path, a, of_checks(b, *rows)).checks == ()


ENV = {
    "run_token": "a1b2",
    "started_at": "2026-11-21T01:02:03Z",
    "git": {"branch": "main", "sha": "840303b", "dirty": False, "diff_sha256": ""},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "world_size": 2,
    "device": {"type": "cpu", "name": "cpu", "count": 0},
    "config_sha256": "c" * 64,
    "effective": {
        "seq_len": 2048,
        "global_batch": 2,
        "accumulation": 1,
        "dtype": "bf16",
        "attention_path": "batched",
    },
    "toggles": [{"name": "NSA_DDP_BUCKET_MB", "value": "50", "default": "25", "source": "env"}],
}


def make_run(
    folder: Path,
    *,
    run_id: str,
    dts: list[float],
    env: dict[str, object] | None = None,
    outcome: Outcome = Outcome.PASS,
    **fields: object,
) -> RunRecord:
    """A run with one baseline launch for each step time, written to `folder`."""
    entries = []
    for index, dt_s in enumerate(dts):
        name = f"run{index}"
        home = folder / "baseline" / name
        home.mkdir(parents=True)
        write_rows(home, [HEADER, *(row(step, dt_s=dt_s) for step in range(1, 61))])
        (home / "env.json").write_text(json.dumps(ENV | (env or {})))
        write_beats(home, 0, beats(0, 60))
        result = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token="a1b2")
        entries.append(
            LaunchEntry(launch=records.launch("torchrun", name=name, steps=60), result=result)
        )
    code = Reason.OK if outcome is Outcome.PASS else Reason.BELOW_LIMIT
    check = throughput(512 / dts[0], outcome, code, "measured")
    phase = records.phase("baseline", check, launches=tuple(entries))
    verdict = Verdict.GO if outcome is Outcome.PASS else Verdict.NO_GO
    required = {"required": ("baseline.throughput",), "run_id": run_id}
    record = run(verdict, (phase,), **(required | fields))
    (folder / "run.json").write_text(record.model_dump_json())
    write_manifest(folder)
    return record
