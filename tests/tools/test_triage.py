"""The steps as data, and run for real over a failure that one toggle brings about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.launch import run_launch
from runbook.launch.observer import Observer, StopRequest
from runbook.launch.supervision import LaunchOptions
from runbook.records import Launch, LaunchEntry, LaunchResult, LaunchStatus, RunRecord
from runbook.tools.drill import FAULTS
from runbook.tools.drill.scene import drill_launch
from runbook.tools.triage import Target, Triage, find_target, run_steps
from runbook.tools.triage_steps import AS_IT_WAS, STEPS, TriageStep, applied
from tests.cli.shell import inside
from tests.factory.tables import table
from tests.launch.helpers import fake_launch
from tests.reports import samples

PRODUCTION = (
    *("torchrun", "--nproc_per_node=2", "-m", "nsa.train", "--config"),
    *("configs/m7c_125m_2xa100_production.yaml", "--dataset", "synthetic", "--ddp", "1"),
)


def target(launch: Launch, **changes: object) -> Target:
    fields: dict[str, object] = {"symptom": "failure", "why": "a test", "steps": 12}
    return Target(launch=launch, **(fields | changes))  # type: ignore[arg-type]


def tried(which: Target, out: Path) -> Triage:
    return run_steps(which, out, stop=StopRequest(), tell=lambda _: None)


def test_one_change_at_a_time_against_the_failing_command() -> None:
    base = fake_launch().model_copy(
        update={"env": {"NSA_DDP_COMPRESS": "bf16", "NSA_OPT_FUSED": "1", "NSA_LR": "0.1"}}
    )
    for step in STEPS["failure"]:
        changed = applied(step, base, name="x", steps=7)
        kept = {k: v for k, v in base.env.items() if k not in (*step.set, *step.unset)}
        if step.single:
            kept = {k: v for k, v in kept.items() if not k.startswith("NSA_DDP_")}
        safe = {"NSA_DDP_COMPRESS": "off", "NSA_OPT_FUSED": "0", "NSA_SDPA_NO_FLASH": "1"}
        safe = safe if step.name == "safe_mode" else {}
        assert changed.env == kept | safe | dict(step.set), step.name
    assert applied(AS_IT_WAS, base, name="x", steps=7).env == base.env


def test_one_process_without_ddp() -> None:
    words = "torchrun --nproc_per_node=2 -m nsa.train --config c.yaml --ddp 1 --steps=300"
    base = fake_launch().model_copy(update={"argv": tuple(words.split())})
    step = STEPS["failure"][-1]
    alone = applied(step, base, name="x", steps=9)
    wanted = "python -m nsa.train --config c.yaml --ddp 0 --steps=9"
    assert (alone.argv, alone.nproc) == (tuple(wanted.split()), 1)
    assert step.changes(base) and not step.changes(alone)


def no_go(folder: Path, status: LaunchStatus, kind: str = "trainer") -> RunRecord:
    """A run below its floor of 39 tok/s whose first launch ended so."""
    record = samples.no_go()
    first, baseline, *others = record.phases
    (entry,) = baseline.launches
    launch = entry.launch.model_copy(update={"kind": kind})
    result = entry.result.model_copy(update={"status": status, "cause": "a test"})
    slow = baseline.model_copy(update={"launches": (LaunchEntry(launch=launch, result=result),)})
    record = record.model_copy(update={"phases": (first, slow, *others)})
    (folder / "run.json").write_text(record.model_dump_json())
    return record


@table(__file__, "symptoms")
def test_a_run_is_triaged_as_what_went_wrong(tmp_path: Path, status: str, symptom: str) -> None:
    """Of a run that only was too slow, by its floor unless another one is given."""
    no_go(tmp_path, LaunchStatus(status))
    assert find_target(tmp_path).symptom == symptom
    if symptom == "throughput":
        assert find_target(tmp_path).floor_toks_per_s == 39.0
        assert find_target(tmp_path, floor=50.0).floor_toks_per_s == 50.0


def test_low_throughput_is_measured(tmp_path: Path) -> None:
    launch = fake_launch("--dt", "0.001", steps=60)
    slow = target(launch, symptom="throughput", steps=60, floor_toks_per_s=1e12)
    triage = tried(slow, tmp_path / "slow")
    assert triage.outcome == "nothing_helped"
    assert "wanted 1e+12 (last 50 steps)" in triage.steps[0].detail
    fine = target(launch, symptom="throughput", steps=60, floor_toks_per_s=1.0)
    assert tried(fine, tmp_path / "fine").outcome == "not_reproduced"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.executes("runbook triage")
def test_the_real_trainer_fails_with_static_graph_and_triage_finds_it(tmp_path: Path) -> None:
    fault = FAULTS["exit"]
    words = ["exit_with_static_graph" if w == "exit" else w for w in
             drill_launch(fault, name="run").argv]  # fmt: skip
    failing = drill_launch(fault, name="run").model_copy(
        update={
            "argv": tuple("12" if w == "2000" else w for w in words),
            "env": {"NSA_PREFILL_BATCHED": "1", "NSA_DDP_STATIC_GRAPH": "1"},
        }
    )
    result = run_launch(failing, LaunchOptions(run_root=tmp_path, observer=Observer(), retry=False))
    assert not result.ok
    ended = inside("triage", str(tmp_path / "run"), "--out", str(tmp_path), "--json", cwd=tmp_path)
    document = json.loads(ended.out)
    assert ended.code == 0, document
    assert document["outcome"] == "found"
    outcomes = [r["outcome"] for r in document["steps"]]
    assert outcomes == [
        "failed",
        "failed",
        "helped",
        *["failed", "helped"] * (len(outcomes) // 2 - 1),
    ]
    assert document["steps"][-1]["name"] == "static_graph_off"
    assert "export NSA_DDP_STATIC_GRAPH=0" in document["exports"]


def test_a_dry_run_names_what_would_run_and_what_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = production(NSA_PREFILL_BATCHED="1").model_dump(mode="json")
    (tmp_path / "launch.json").write_text(json.dumps({"launch": launch}))
    words = ["triage", str(tmp_path), "--floor", "39", "--set", "train.seq_len=64"]
    words += ["--set", "NSA_DDP_BUCKET_MB=1", "--steps", "9", "--dry-run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    tail = f"{' '.join(PRODUCTION)} --steps 9 --set train.seq_len=64"
    assert lines[:2] == [
        f"triage of the launch in {tmp_path} (throughput)",
        "0. the command as it was [it has to fail again]",
    ]
    assert "1. buckets of 50 MiB [requirement T1]" in lines
    assert [one for one in lines if one.startswith("   ")] == [
        f"   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=1 {tail}",
        f"   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=50 {tail}",
        *["   skipped: it would change nothing"] * 2,
        f"   NSA_PREFILL_BATCHED=1 NSA_DDP_BUCKET_MB=1 NSA_DISABLE_AUX_STATS=1 {tail}",
    ]


@table(__file__, "defaults")
def test_a_step_that_equals_the_defaults_does_not_run(name: str, changed: dict[str, str]) -> None:
    """Static graph 0, find-unused 0 and tracing off ran over a flaky fault, and were its cure."""
    step = next(step for steps in STEPS.values() for step in steps if step.name == name)
    bare = fake_launch().model_copy(update={"env": {}})
    if name not in ("find_unused", "compression_off"):
        assert not step.changes(bare)
    same = {"NSA_DDP_STATIC_GRAPH": "false", "NSA_DDP_COMPRESS": "off", "NSA_TB_DISABLE": "1"}
    same["NSA_OPT_FUSED"] = "0"
    assert step.changes(bare.model_copy(update={"env": same | changed}))
    done = same | changed | dict(step.set)
    for variable in step.unset:
        done.pop(variable, None)
    assert not step.changes(bare.model_copy(update={"env": done}))


def production(**env: str) -> Launch:
    """A launch of the production config, as a profile plans it."""
    config = PRODUCTION[PRODUCTION.index("--config") + 1]
    return fake_launch().model_copy(update={"argv": PRODUCTION, "env": env, "config": config})


def step_of(symptom: str, name: str) -> TriageStep:
    return next(step for step in STEPS[symptom] if step.name == name)


def test_numbers_follow_flag_variable_and_config() -> None:
    shorter = step_of("memory", "smaller_sequence")
    assert shorter.numbers(production()) == {"NSA_SEQ_LEN": "1024"}
    assert applied(shorter, production(), name="x", steps=3).env["NSA_SEQ_LEN"] == "1024"
    assert not shorter.changes(production(NSA_SEQ_LEN="512"))
    flagged = production()
    flagged = flagged.model_copy(update={"argv": (*flagged.argv, "--seq-len", "4096")})
    changed = applied(shorter, flagged, name="x", steps=3)
    assert changed.argv[changed.argv.index("--seq-len") + 1] == "1024"
    assert "NSA_SEQ_LEN" not in changed.env
    lower = step_of("non_finite", "lower_lr")
    assert lower.numbers(production()) == {"NSA_LR": "2e-05"}
    assert lower.numbers(production(NSA_LR="0.5")) == {"NSA_LR": "0.05"}
    assert not lower.changes(production(NSA_LR="0"))


def test_checkpointing_and_data_are_changed_where_they_differ() -> None:
    on = step_of("memory", "checkpointing")
    changed = applied(on, production(), name="x", steps=3)
    assert changed.env["NSA_DDP_DISABLE_GC"] == "0"
    assert changed.config_overrides == {"runtime.gradient_checkpointing": True}
    assert not on.changes(production(NSA_DDP_DISABLE_GC="0"))  # the config has it
    data = step_of("failure", "synthetic_data")
    assert not data.changes(production())
    streamed = production()
    words = ["fineweb_edu" if word == "synthetic" else word for word in streamed.argv]
    streamed = streamed.model_copy(update={"argv": tuple(words)})
    assert applied(data, streamed, name="x", steps=30).argv == (*production().argv, "--steps", "30")


def test_the_safe_mode_comes_with_what_it_overrides() -> None:
    safe = step_of("failure", "safe_mode")
    launch = production(NSA_DDP_COMPRESS="bf16", NSA_DDP_STATIC_GRAPH="1")
    wanted = {"NSA_DDP_COMPRESS": "off", "NSA_DDP_STATIC_GRAPH": "0", "NSA_DDP_SAFE_MODE": "1"}
    wanted["NSA_SDPA_NO_FLASH"] = "1"
    assert applied(safe, launch, name="x", steps=3).env == wanted
    assert set(safe.exports(launch)) == {f"export {k}={v}" for k, v in wanted.items()}


class Rates:
    """A trainer that fails in a given order, as it was and with a change."""

    def __init__(self, without: str, with_it: str) -> None:
        self.left = {True: list(without), False: list(with_it)}

    def __call__(self, launch: Launch, *_: object, **__: object) -> LaunchResult:
        base = launch.purpose == AS_IT_WAS.title
        fails = self.left[base].pop(0) == "f"
        status = LaunchStatus.CRASHED if fails else LaunchStatus.COMPLETED
        return LaunchResult(status=status, cause="a test" if fails else "", duration_s=1.0)


@table(__file__, "tries")
def test_a_change_is_believed_where_chance_would_hardly_look_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, with_it: str, outcome: str,
    text: str,
) -> None:  # fmt: skip
    """The order of the ends is given, which no real launch allows."""
    monkeypatch.setattr("runbook.tools.triage.run_launch", Rates(without, with_it))
    one = step_of("failure", "compression_off")
    monkeypatch.setitem(STEPS, "failure", (one,))
    triage = tried(target(production()), tmp_path / "t")
    assert triage.outcome == outcome and text in triage.finding
    assert bool(triage.exports) == (outcome == "found")


def test_what_cannot_be_triaged_is_told_as_what_it_is(tmp_path: Path) -> None:
    """What is not there is no run, and a run without a failed launch did not pass."""
    missing = inside("triage", "nope", cwd=tmp_path)
    assert missing.code == 2 and "no run 'nope'" in missing.err
    folder = tmp_path / "artifacts" / "20261121T010203Z-840303b"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(samples.go().model_dump_json())
    healthy = inside("triage", cwd=tmp_path)
    name = "artifacts/20261121T010203Z-840303b"
    assert healthy.code == 2
    assert f"no training launch of {name} failed; runbook report {name} says" in healthy.err
