"""The steps as data, and run for real over a failure that one toggle brings about."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.errors import UsageError
from runbook.launch import run_launch
from runbook.launch.observer import Observer
from runbook.records import Launch
from runbook.tools.drill.faults import FAULTS
from runbook.tools.drill.scene import drill_launch
from runbook.tools.triage import STEPS, applied, run_steps
from runbook.tools.triage_target import Target, find_target
from tests.launch.helpers import FAST, fake_launch

SMOKE = Path(__file__).parents[2] / "configs" / "cpu_smoke.yaml"


def target(launch: Launch, **changes: object) -> Target:
    fields: dict[str, object] = {"symptom": "failure", "why": "a test", "steps": 12}
    return Target(launch=launch, **(fields | changes))  # type: ignore[arg-type]


def test_the_steps_are_those_of_the_requirements() -> None:
    assert [step.name for step in STEPS["failure"]] == [
        "compression_off", "static_graph_off", "find_unused", "nccl_debug", "sdpa_no_flash",
        "v2_off", "fused_unset", "single_gpu",
    ]  # fmt: skip
    assert [step.name for step in STEPS["throughput"]] == [
        "bucket_50", "flash_allowed", "tracing_off", "aux_stats_off",
    ]  # fmt: skip
    for steps in STEPS.values():
        assert all(re.fullmatch(r"requirement [TN]\d+", step.source) for step in steps)


def test_one_change_at_a_time_against_the_failing_command() -> None:
    base = fake_launch().model_copy(
        update={"env": {"NSA_DDP_COMPRESS": "bf16", "NSA_OPT_FUSED": "1", "NSA_LR": "0.1"}}
    )
    for step in STEPS["failure"]:
        changed = applied(step, base, name="x", steps=7)
        kept = {k: v for k, v in base.env.items() if k not in (*step.set, *step.unset)}
        if step.single:
            kept = {k: v for k, v in kept.items() if not k.startswith("NSA_DDP_")}
        assert changed.env == kept | dict(step.set), step.name
    assert applied(None, base, name="x", steps=7).env == base.env


def test_one_process_without_ddp() -> None:
    words = "torchrun --nproc_per_node=2 -m nsa.train --config c.yaml --ddp 1 --steps=300"
    base = fake_launch().model_copy(update={"argv": tuple(words.split())})
    step = STEPS["failure"][-1]
    alone = applied(step, base, name="x", steps=9)
    wanted = "python -m nsa.train --config c.yaml --ddp 0 --steps=9"
    assert (alone.argv, alone.nproc) == (tuple(wanted.split()), 1)
    assert step.changes(base) and not step.changes(alone)


def test_a_step_that_changes_nothing_is_said() -> None:
    base = fake_launch()
    names = {step.name for step in STEPS["failure"] if not step.changes(base)}
    assert names == {"static_graph_off", "fused_unset"}
    set_so = {"NSA_OPT_FUSED": "1", "NSA_DDP_STATIC_GRAPH": "1"}
    with_it = base.model_copy(update={"env": set_so})
    assert all(step.changes(with_it) for step in STEPS["failure"])


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
    triage = run_steps(target(fake_launch()), tmp_path / "t", budgets=FAST)
    assert triage.outcome == "not_reproduced"
    assert [step.name for step in triage.steps] == ["as_it_was"]


def test_nothing_helps_and_every_step_is_on_record(tmp_path: Path) -> None:
    launch = fake_launch("--fault", "exit7")
    seen: list[str] = []
    stuck = target(launch)
    triage = run_steps(stuck, tmp_path / "t", budgets=FAST, tell=lambda r: seen.append(r.name))
    assert triage.outcome == "nothing_helped"
    assert seen == ["as_it_was", *(step.name for step in STEPS["failure"])]
    by = {step.name: step for step in triage.steps}
    assert by["fused_unset"].outcome == by["static_graph_off"].outcome == "skipped"
    assert "parity tests: " in by["v2_off"].detail
    assert json.loads((tmp_path / "t" / "triage.json").read_text())["outcome"] == "nothing_helped"
    assert all(Path(r.run_dir).is_dir() for r in triage.steps if r.run_dir)


def test_low_throughput_is_measured(tmp_path: Path) -> None:
    launch = fake_launch("--dt", "0.001", steps=60)
    slow = target(launch, symptom="throughput", steps=60, floor_toks_per_s=1e12)
    triage = run_steps(slow, tmp_path / "slow", budgets=FAST)
    assert triage.outcome == "nothing_helped"
    assert "wanted 1e+12 (last 50 steps)" in triage.steps[0].detail
    fine = target(launch, symptom="throughput", steps=60, floor_toks_per_s=1.0)
    assert run_steps(fine, tmp_path / "fine", budgets=FAST).outcome == "not_reproduced"


@pytest.mark.e2e
@pytest.mark.slow
def test_the_real_trainer_fails_with_static_graph_and_triage_finds_it(
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
    result = run_launch(failing, tmp_path, observer=Observer(), retry=False)
    assert not result.ok
    code = main(["triage", str(tmp_path / "run"), "--out", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0, document
    assert document["outcome"] == "found"
    assert [r["outcome"] for r in document["steps"]] == ["failed", "failed", "helped"]
    assert document["steps"][-1]["name"] == "static_graph_off"
    assert "export NSA_DDP_STATIC_GRAPH=0" in document["exports"]


def test_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triage", "--dry-run", str(SMOKE), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["steps"]] == [r.name for r in STEPS["failure"]]
    assert document["steps"][6]["note"].startswith("skipped")
    assert main(["triage", "nonsense.yaml"]) == 2


DRY_RUN = """\
triage of config {config} (throughput)
every try runs with a copy of the config in which train.seq_len=64
0. the command as it was [it has to fail again]
   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=1 {start} {end}
1. buckets of 50 MiB [requirement T1]
   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=50 {start} {end}
2. flash kernel not disabled [requirement T1]
   skipped: the command does this already
3. no NVTX, no TensorBoard, no audit [requirement T1]
   skipped: the command does this already
4. no auxiliary statistics [requirement N1]
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
    (first, *_) = json.loads(capsys.readouterr().out)["steps"]
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
    (fused,) = (step for step in STEPS["failure"] if step.name == "fused_unset")
    assert not fused.changes(zero)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("static_graph_off", {"NSA_DDP_FIND_UNUSED": "1"}),
        ("find_unused", {"NSA_DDP_FIND_UNUSED": "0"}),
        ("compression_off", {"NSA_DDP_BUCKET_MB": "25"}),
        ("tracing_off", {"NSA_TB_DISABLE": "0"}),
        ("flash_allowed", {"NSA_SDPA_NO_FLASH": "on"}),
    ],
)
def test_a_step_that_equals_the_defaults_does_not_run(name: str, changed: dict[str, str]) -> None:
    """Static graph 0, find-unused 0 and tracing off ran over a flaky fault, and were its cure."""
    (step,) = (step for steps in STEPS.values() for step in steps if step.name == name)
    bare = fake_launch().model_copy(update={"env": {}})
    if name not in ("find_unused", "compression_off"):
        assert not step.changes(bare)
    same = {"NSA_DDP_STATIC_GRAPH": "false", "NSA_DDP_COMPRESS": "off", "NSA_TB_DISABLE": "1"}
    assert step.changes(bare.model_copy(update={"env": same | changed}))
    done = same | changed | dict(step.set)
    for variable in step.unset:
        done.pop(variable, None)
    assert not step.changes(bare.model_copy(update={"env": done}))
