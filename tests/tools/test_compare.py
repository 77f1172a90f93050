"""When two runs may be compared, and what follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.records import Outcome, Reason
from runbook.tools.compare import Comparison, compare_runs, comparison_text
from tests.tools.compared_runs import make_run

SAME = [0.050, 0.051, 0.049]
NEW_CODE: dict[str, object] = {"git": {"sha": "aa84eda", "dirty": False, "diff_sha256": ""}}
NEW_TORCH: dict[str, object] = {"versions": {"python": "3.11.7", "torch": "2.14.0"}}


def compare(
    tmp_path: Path,
    dts: list[float],
    *,
    reference: list[float] | None = None,
    env: dict[str, object] | None = None,
    outcome: Outcome = Outcome.PASS,
    **fields: object,
) -> Comparison:
    a = make_run(tmp_path / "a", run_id="a", dts=reference or SAME)
    b = make_run(tmp_path / "b", run_id="b", dts=dts, env=env, outcome=outcome, **fields)
    return compare_runs(a, tmp_path / "a", b, tmp_path / "b")


def test_new_code_at_the_same_speed_is_not_worse(tmp_path: Path) -> None:
    found = compare(tmp_path, [0.0501, 0.0509, 0.0491], env=NEW_CODE)
    assert found.comparable
    assert [(one.kind, one.what) for one in found.differences] == [("code", "git.sha (3 launches)")]
    assert found.speeds[0].decision is not None
    assert found.speeds[0].decision.outcome.value == "PASS"
    assert found.speeds[0].ratio == pytest.approx(1.0, abs=0.005)
    assert found.exit_code == 0


def test_three_slow_launches_are_a_suspicion_and_twelve_are_proof(tmp_path: Path) -> None:
    slow = [0.055, 0.0562, 0.054]
    few = compare(tmp_path / "few", slow, env=NEW_CODE)
    assert few.exit_code == 3
    assert few.speeds[0].ratio == pytest.approx(0.909, abs=0.005)
    many = compare(tmp_path / "many", slow * 4, reference=SAME * 4, env=NEW_CODE)
    assert many.exit_code == 1
    assert "B is worse than A" in comparison_text(many)


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
    assert "NOT COMPARABLE" in comparison_text(found)


def test_another_toggle_alone_is_one_cause(tmp_path: Path) -> None:
    toggles = [{"name": "NSA_DDP_BUCKET_MB", "value": "25", "default": "25", "source": "env"}]
    found = compare(tmp_path, SAME, env={"toggles": toggles})
    assert found.comparable
    assert [(d.kind, d.a, d.b) for d in found.differences] == [("toggles", "50", "25")]


def test_another_profile_or_an_unfinished_run_is_an_obstacle(tmp_path: Path) -> None:
    other = compare(tmp_path / "x", SAME, profile="cpu")
    assert any("profile" in text for text in other.obstacles)
    cut = compare(tmp_path / "y", SAME, finished_at=None)
    assert any("did not reach its end" in text for text in cut.obstacles)


def test_a_launch_without_env_json_or_with_mixed_rows_counts_for_nothing(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", run_id="a", dts=SAME)
    b = make_run(tmp_path / "b", run_id="b", dts=SAME)
    log = tmp_path / "b" / "baseline" / "run1" / "training.csv"
    log.write_text(log.read_text() + log.read_text().partition("\n")[2])
    found = compare_runs(a, tmp_path / "a", b, tmp_path / "b")
    assert found.speeds[0].launches == ("run0", "run2")
    assert "2 launches, 3 are needed" in found.speeds[0].note
    (tmp_path / "b" / "baseline" / "run0" / "env.json").unlink()
    found = compare_runs(a, tmp_path / "a", b, tmp_path / "b")
    assert found.obstacles == ("no env.json on both sides for: baseline/run0",)


def test_a_check_that_vanished_is_shown_and_worse(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", run_id="a", dts=SAME)
    b = make_run(tmp_path / "b", run_id="b", dts=SAME)
    bare = b.phases[0].model_copy(update={"checks": ()})
    found = compare_runs(
        a, tmp_path / "a", b.model_copy(update={"phases": (bare,)}), tmp_path / "b"
    )
    assert "baseline.throughput (required)  PASS -> no row" in comparison_text(found)
    assert found.exit_code == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, SAME, env=NEW_CODE)
    words = ["compare", "a", "b", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "B is not shown to be worse than A" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["comparable"]) == (1, True)
    assert document["speeds"][0]["decision"]["outcome"] == "PASS"
    assert main(["compare", "a", "nothing", "--out", str(tmp_path)]) == 2


def test_what_one_run_was_not_asked_for_is_no_change(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", run_id="a", dts=SAME)
    b = make_run(tmp_path / "b", run_id="b", dts=SAME)
    rows = tuple(
        check.model_copy(
            update={
                "outcome": Outcome.SKIPPED,
                "code": Reason.NOT_ASKED_FOR,
                "follows": check.phase,
            }
        )
        for check in b.phases[0].checks
    )
    phase = b.phases[0].model_copy(update={"checks": rows})
    found = compare_runs(
        a, tmp_path / "a", b.model_copy(update={"phases": (phase,)}), tmp_path / "b"
    )
    assert not {check.id for check in found.checks} & {row.id for row in rows}
