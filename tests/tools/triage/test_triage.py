"""The ladder as data, and climbed for real over a failure that one toggle brings about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.errors import UsageError
from runbook.launch import run_launch
from runbook.launch.observer import SilentObserver
from runbook.records import Launch
from runbook.tools.drill.faults import FAULTS
from runbook.tools.drill.scene import drill_launch
from runbook.tools.triage import LADDERS, Target, applied, climb, find_target
from tests.launch.helpers import FAST, fake_launch

SMOKE = Path(__file__).parents[3] / "configs" / "cpu_smoke.yaml"


def target(launch: Launch, **changes: object) -> Target:
    fields: dict[str, object] = {"symptom": "failure", "why": "a test", "steps": 12}
    return Target(launch=launch, **(fields | changes))  # type: ignore[arg-type]


def test_the_ladders_are_the_seeds() -> None:
    assert [rung.name for rung in LADDERS["failure"]] == [
        "compression_off", "static_graph_off", "find_unused", "nccl_debug", "sdpa_no_flash",
        "v2_off", "fused_unset", "single_gpu",
    ]  # fmt: skip
    assert [rung.name for rung in LADDERS["throughput"]] == [
        "bucket_50", "flash_allowed", "tracing_off", "aux_stats_off",
    ]  # fmt: skip
    for ladder in LADDERS.values():
        assert all(rung.source.startswith("seed 00") for rung in ladder)


def test_one_change_at_a_time_against_the_failing_command() -> None:
    base = fake_launch().model_copy(
        update={"env": {"NSA_DDP_COMPRESS": "bf16", "NSA_OPT_FUSED": "1", "NSA_LR": "0.1"}}
    )
    for rung in LADDERS["failure"]:
        changed = applied(rung, base, name="x", steps=7)
        kept = {k: v for k, v in base.env.items() if k not in (*rung.set, *rung.unset)}
        if rung.single:
            kept = {k: v for k, v in kept.items() if not k.startswith("NSA_DDP_")}
        assert changed.env == kept | dict(rung.set), rung.name
    assert applied(None, base, name="x", steps=7).env == base.env


def test_one_process_without_ddp() -> None:
    words = "torchrun --nproc_per_node=2 -m nsa.train --config c.yaml --ddp 1 --steps=300"
    base = fake_launch().model_copy(update={"argv": tuple(words.split())})
    rung = LADDERS["failure"][-1]
    alone = applied(rung, base, name="x", steps=9)
    wanted = "python -m nsa.train --config c.yaml --ddp 0 --steps=9"
    assert (alone.argv, alone.nproc) == (tuple(wanted.split()), 1)
    assert rung.changes(base) and not rung.changes(alone)


def test_a_rung_that_changes_nothing_is_said() -> None:
    base = fake_launch()
    names = {rung.name for rung in LADDERS["failure"] if not rung.changes(base)}
    assert names == {"fused_unset"}
    with_it = base.model_copy(update={"env": {"NSA_OPT_FUSED": "1"}})
    assert all(rung.changes(with_it) for rung in LADDERS["failure"])


def test_targets(tmp_path: Path) -> None:
    config = find_target(SMOKE)
    assert (config.symptom, config.steps, config.launch.nproc) == ("failure", 30, 2)
    assert find_target(SMOKE, floor=39.0).symptom == "throughput"
    with pytest.raises(UsageError, match="cannot be triaged"):
        find_target(tmp_path)
    with pytest.raises(UsageError, match="--floor"):
        find_target(SMOKE, symptom="throughput")
    launch = fake_launch()
    document = {"launch": json.loads(launch.model_dump_json())}
    (tmp_path / "launch.json").write_text(json.dumps(document))
    (tmp_path / "result.json").write_text(json.dumps({"ranks": [{"steps_done": 500}]}))
    found = find_target(tmp_path)
    assert found.launch == launch
    assert found.steps == 510  # far enough to come to the failing step again


def test_a_failure_that_does_not_come_back_is_not_triaged(tmp_path: Path) -> None:
    triage = climb(target(fake_launch()), tmp_path / "t", budgets=FAST)
    assert triage.outcome == "not_reproduced"
    assert [rung.name for rung in triage.rungs] == ["as_it_was"]


def test_nothing_helps_and_every_rung_is_on_record(tmp_path: Path) -> None:
    launch = fake_launch("--fault", "exit7")
    seen: list[str] = []
    stuck = target(launch)
    triage = climb(stuck, tmp_path / "t", budgets=FAST, tell=lambda r: seen.append(r.name))
    assert triage.outcome == "nothing_helped"
    assert seen == ["as_it_was", *(rung.name for rung in LADDERS["failure"])]
    by = {rung.name: rung for rung in triage.rungs}
    assert by["fused_unset"].outcome == "skipped"
    assert "parity tests: " in by["v2_off"].detail
    assert json.loads((tmp_path / "t" / "triage.json").read_text())["outcome"] == "nothing_helped"
    assert all(Path(r.run_dir).is_dir() for r in triage.rungs if r.run_dir)


def test_low_throughput_is_measured(tmp_path: Path) -> None:
    launch = fake_launch("--dt", "0.001", steps=60)
    slow = target(launch, symptom="throughput", steps=60, floor_toks_per_s=1e12)
    triage = climb(slow, tmp_path / "slow", budgets=FAST)
    assert triage.outcome == "nothing_helped"
    assert "wanted 1e+12 (last 50 steps)" in triage.rungs[0].detail
    fine = target(launch, symptom="throughput", steps=60, floor_toks_per_s=1.0)
    assert climb(fine, tmp_path / "fine", budgets=FAST).outcome == "not_reproduced"


@pytest.mark.e2e
@pytest.mark.slow
def test_the_real_trainer_fails_with_static_graph_and_the_ladder_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS["exit"]
    words = ["exit_with_static_graph" if w == "exit" else w for w in
             drill_launch(fault, name="run").argv]  # fmt: skip
    failing = drill_launch(fault, name="run").model_copy(
        update={
            "argv": tuple("12" if w == "2000" else w for w in words),
            "env": {"NSA_PREFILL_BATCHED": "1", "NSA_DDP_STATIC_GRAPH": "1"},
        }
    )
    result = run_launch(failing, tmp_path, observer=SilentObserver(), retry=False)
    assert not result.ok
    code = main(["triage", str(tmp_path / "run"), "--out", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0, document
    assert document["outcome"] == "found"
    assert [r["outcome"] for r in document["rungs"]] == ["failed", "failed", "helped"]
    assert document["rungs"][-1]["name"] == "static_graph_off"
    assert "export NSA_DDP_STATIC_GRAPH=0" in document["exports"]


def test_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triage", "--dry-run", str(SMOKE), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["ladder"]] == [r.name for r in LADDERS["failure"]]
    assert document["ladder"][6]["note"].startswith("skipped")
    assert main(["triage", "nonsense.yaml"]) == 2


DRY_RUN = """\
triage of config {config} (ladder: throughput)
every try runs with a copy of the config in which train.seq_len=64
0. the command as it was [it has to fail again]
   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=1 {start} {end}
1. buckets of 50 MiB [seed 000, Failure Playbook: low throughput]
   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=50 {start} {end}
2. flash kernel not disabled [seed 000, Failure Playbook: low throughput]
   skipped: the command has this already
3. no NVTX, no TensorBoard, no audit [seed 000, Failure Playbook: low throughput]
   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=1 NSA_NVTX=0 NSA_TB_DISABLE=1 NSA_SDPA_AUDIT=0 \
{start} {end}
4. no auxiliary statistics [seed 000, NVTX Profiling]
   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=1 NSA_DISABLE_AUX_STATS=1 {start} {end}
"""


def test_dry_run_word_for_word(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["triage", str(SMOKE), "--floor", "39", "--set", "train.seq_len=64"]
    words += ["--set", "NSA_DDP_BUCKET_MB=1", "--steps", "9", "--ranks", "3", "--dry-run"]
    assert main(words) == 0
    start = f"torchrun --nproc_per_node=3 -m nsa.train --config {SMOKE} --dataset synthetic"
    end = "--ddp 1 --steps 9 --set train.seq_len=64"
    assert capsys.readouterr().out == DRY_RUN.format(config=SMOKE, start=start, end=end)


def test_a_profile_gives_its_config_ranks_and_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["triage", "--profile", "a100x2_pcie4", "--dry-run", "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["ladder"]
    assert "m7c_125m_2xa100_production.yaml" in first["command"]
    assert "NCCL_ALGO=Ring" in first["command"] and "NSA_DDP_BUCKET_MB=100" in first["command"]


def test_wrong_words_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triage", str(SMOKE), "--set", "NSA_DDP_COMPRES=off", "--dry-run"]) == 2
    assert "NSA_DDP_COMPRESS" in capsys.readouterr().err
    assert main(["triage", str(SMOKE), "--steps", "0", "--dry-run"]) == 2
    assert main(["triage", str(tmp_path), "--profile", "cpu"]) == 2
    assert "go with a config" in capsys.readouterr().err


def test_a_switch_that_is_zero_is_not_set() -> None:
    zero = fake_launch().model_copy(update={"env": {"NSA_OPT_FUSED": "0"}})
    (fused,) = (rung for rung in LADDERS["failure"] if rung.name == "fused_unset")
    assert not fused.changes(zero)
