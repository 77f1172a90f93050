"""What production stands on: a GO of the same configuration, machine and code, untouched."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from reports.view import following
from runbook.config.load import load_profile
from runbook.config.plan import load_plan, with_plan
from runbook.config.settings import parse_settings
from runbook.config.setup import RunOptions, Setup
from runbook.engine import earlier
from runbook.engine.earlier.standing import Standing, find_standing, require_standing
from runbook.engine.plan.prepare import prepare
from runbook.engine.plan.progress import pace_of_the_go
from runbook.engine.scope import caveats_of
from runbook.engine.starting import extend
from runbook.errors import UsageError
from runbook.folder.manifest import load_record, write_manifest
from runbook.machine.identity import identity
from runbook.records import LaunchEntry, LaunchResult, LaunchStatus
from tests import executed
from tests.cli.shell import environment, inside, runbook
from tests.engine.test_doubt import phase, record
from tests.engine.test_interrupt_and_resume import wait_for
from tests.factory.records import launch
from tests.factory.tables import table
from tests.shared import once

PROFILE = """\
extends: cpu
name: tiny
phases: {baseline: {launches: 1, steps: 24}}
required: [baseline.completed, baseline.loss_finite]
"""


def accepted(folder: Path) -> tuple[Path, str]:
    """The folder of the one run that was GO, and its id."""
    (folder / "tiny.yaml").write_text(PROFILE)
    words = ("run", "--profile", "tiny.yaml", "--phase", "baseline", "--out", "runs")
    done = runbook(*words, cwd=folder, timeout_s=300)
    assert done.code == 0, done.out + done.err
    (run,) = (path.parent.name for path in folder.glob("runs/*/run.json"))
    return folder, run


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return once(tmp_path_factory, "standing", accepted)


def found(go: tuple[Path, str], *words: str, out: Path | None = None) -> Standing:
    profile = load_profile(str(go[0] / "tiny.yaml"))
    return find_standing(out or go[0] / "runs", profile, parse_settings(words))


def asked(go: tuple[Path, str], **options: Any) -> Setup:
    """A launch of production behind that run."""
    words = {"plan": "production", "profile": str(go[0] / "tiny.yaml"), "out": go[0] / "runs"}
    return prepare(RunOptions(**words | options))


pytestmark = pytest.mark.e2e


def test_production_may_start_behind_a_go_by_whose_rate_time_and_cost_are_told(
    go: tuple[Path, str],
) -> None:
    folder, run = go
    setup = asked(go)
    assert setup.profile.plan is not None and setup.phases[-1].name == "production"
    assert setup.profile.plan.go == f"{run}: GO for 2 of 76 checks, fewer steps (baseline.steps=24)"
    words = ("--profile", "tiny.yaml", "--out", "runs", "--dry-run", "--gpu-hour-price", "3600")
    done = inside("launch", *words, cwd=folder)
    assert done.code == 0 and "# refused" not in done.out, done.err
    pace = pace_of_the_go(setup)
    assert pace is not None and 0.0 < pace.step_s < 30.0 and pace.launch.phase == "baseline"
    rate = f"{pace.step_s:.2g} s per step and [^#]*, the rate of baseline/run1 in {run}"
    assert len(re.findall(rate, done.out)) == 6  # sanity, smoke, extended twice, two legs
    told = r"# 5/5 production +2 launches.* cost about ([\d.]+) at 3600 per GPU hour"
    cost = re.search(told, done.out)
    expected = 2 * pace.startup_s + 5000 * pace.step_s
    assert cost is not None and float(cost[1]) == pytest.approx(expected, rel=0.01)


@pytest.mark.executes("runbook launch")
def test_what_a_go_prints_for_production_starts_it(go: tuple[Path, str]) -> None:
    """Typed as its page has it, and interrupted as soon as something is started."""
    folder, run = go
    (step,) = following(load_record(folder / "runs" / run), ())
    line = step.command
    assert line.startswith("runbook launch --profile ")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *shlex.split(line)], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    ) as harness:  # fmt: skip
        begun = wait_for(folder, "runs/*/preflight/*/launch.json").parents[2]
        harness.send_signal(signal.SIGINT)
        out, _ = harness.communicate(timeout=200)
    executed.note(line, harness.returncode)
    assert harness.returncode == 130, out
    assert re.search(r"production +2 launches, about .*, at most 1 h 00 min", out), out
    shutil.rmtree(begun)  # the others look at the one run that was GO


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train.lr=0.1", "train.lr 0.003 then, 0.1 now"),
        ("NSA_DDP_BUCKET_MB=1", "NSA_DDP_BUCKET_MB 0.5 then, 1 now"),
    ],
)
def test_another_configuration_is_no_ground(go: tuple[Path, str], word: str, told: str) -> None:
    """But for how long it trains and what it writes."""
    free = ("NSA_TB_DISABLE=0", "train.save_every=3", "train.steps=77")
    assert found(go, *free).run_id == go[1]
    here = found(go, word, *free)
    assert (here.run_id, here.left_out[go[1]]) == ("", told)
    told = "production needs a GO of this configuration on this machine"
    assert told in asked(go, settings=(word,)).refused


OURS = """\
extends: production
name: ours
phases:
  smoke: {0}
  extended: {0}
  production: {0}
"""


@pytest.mark.parametrize("log_every", [7, None])
def test_what_the_phase_behind_it_changes_itself_counts_too(
    go: tuple[Path, str], tmp_path: Path, log_every: int | None
) -> None:
    """But for how long it trains and what it writes."""
    change = f"{{train.log_every: {log_every}}}" if log_every else "{data.tokenizer: gpt2}"
    plan = tmp_path / "ours.yaml"
    plan.write_text(OURS.format(f"{{config_overrides: {change}}}"))
    refused = asked(go, plan=str(plan)).refused
    assert ("data.tokenizer byte then, gpt2 now" in refused) is bool(refused) is (log_every is None)


def test_another_machine_or_code_is_no_ground(
    go: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("machine", "commit", "torch"):
        monkeypatch.setattr(earlier, "identity", lambda name=name: {**identity(), name: "else"})
        assert f"{name} " in found(go).left_out[go[1]]


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=2) + "\n")


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of run.json, with the manifest made anew."""

    def rewrite(run: Path) -> None:
        edited(run / "run.json", change)
        write_manifest(run)

    return rewrite


def forged(run: Path) -> None:
    """Another number in record and journal."""
    for name in ("run.json", "events.jsonl"):
        path = run / name
        path.write_text(path.read_text().replace("highest 5.", "highest 4."))
    write_manifest(run)


def with_other_limits(document: dict[str, Any], **devices: object) -> None:
    document["profile_document"]["limits"]["drift"]["value"] = 99.0
    document["profile_document"]["hardware"].update(devices)


def on_gpus(document: dict[str, Any]) -> None:
    with_other_limits(document, device="cuda", gpus=2, gpu_name="A100")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: (run / "report.md").unlink(), "report.md: missing"),
        (forged, "baseline.loss_finite"),
        (rewritten(with_other_limits), "^limits.drift.value 99.0 then, "),
        (rewritten(lambda run: run["options"].update(steps_scale=0.1)), "^--steps-scale 0.1 then"),
        # Said before all that follows from it.
        (rewritten(on_gpus), "^it is of other devices: 2 x A100 then, CPUs now"),
    ],
)
def test_a_go_that_was_edited_or_is_of_less_or_of_something_else_is_no_ground(
    go: tuple[Path, str], tmp_path: Path, change: Callable[[Path], object], told: str
) -> None:
    shutil.copytree(go[0] / "runs", tmp_path, symlinks=True, dirs_exist_ok=True)
    change(tmp_path / go[1])
    here = found(go, out=tmp_path)
    assert not here.run_id and re.search(told, here.left_out[go[1]])


def newer_no_go(go: tuple[Path, str], out: Path) -> str:
    name = "29990101T000000Z-nogit"
    shutil.copytree(go[0] / "runs", out, symlinks=True)
    shutil.copytree(go[0] / "runs" / go[1], out / name)
    told = {"run_id": name, "verdict": "NO-GO", "reasons": ["baseline.completed is FAIL"]}
    rewritten(lambda document: document.update(told))(out / name)
    return name


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: None, "baseline.completed is FAIL"),
        # Nobody knows whether it was a NO-GO.
        (lambda run: (run / "run.json").write_text("{"), "run.json is"),
    ],
)
def test_a_newer_run_that_was_no_go_or_is_damaged_leaves_no_ground(
    go: tuple[Path, str], tmp_path: Path, change: Callable[[Path], object], told: str
) -> None:
    runs = tmp_path / "runs"
    name, renamed = newer_no_go(go, runs), "29990202T000000Z-nogit"
    change(runs / name)
    here = found(go, out=runs)
    assert here.run_id == "" and told in here.left_out[name]
    # An older GO under a newer name does not come after it.
    shutil.copytree(go[0] / "runs" / go[1], runs / renamed)
    here = found(go, out=runs)
    assert here.run_id == "" and list(here.left_out) == [renamed, name]
    assert f"its folder was renamed from {go[1]}: rename it back" == here.left_out[renamed]


def test_a_newer_no_go_of_another_configuration_takes_no_ground(
    go: tuple[Path, str], tmp_path: Path
) -> None:
    name = newer_no_go(go, tmp_path / "runs")
    env = tmp_path / "runs" / name / "baseline/run1/env.json"
    edited(env, lambda document: document["config"]["train"].update(lr=9.0))
    assert found(go, out=tmp_path / "runs").run_id == go[1]


def test_a_launch_that_goes_on_looks_at_its_go_again(go: tuple[Path, str], tmp_path: Path) -> None:
    setup = asked(go)
    require_standing(setup, go[0] / "runs", ())
    require_standing(setup, tmp_path, {"production"})
    with pytest.raises(UsageError, match=f"{go[1]}, behind which this launch began, is none any"):
        require_standing(setup, tmp_path, {"smoke"})


@table(__file__, "stands_on")
def test_the_first_line_tells_what_production_stands_on(behind: str, said: list[str]) -> None:
    plan = load_plan("production", has_gpu=False)
    profile = with_plan(load_profile("cpu"), plan, shipped=True, go=behind)
    told = record("cpu", profile_document=profile.model_dump(mode="json"))
    done = LaunchEntry(launch=launch(), result=LaunchResult(status=LaunchStatus.COMPLETED))
    started = {"name": "production", "started_at": "now", "launches": (done,)}
    ran = phase().model_copy(update=started)
    assert [text for text in caveats_of(told, [ran]) if text] == said
    assert caveats_of(told, [phase()]) == (), "no phase ran that needs one"


def test_a_launch_without_a_go_is_not_extended_to_production(tmp_path: Path) -> None:
    options = RunOptions(plan="production", profile="cpu", out=tmp_path, until="smoke")
    setup = prepare(options)
    asked = setup.options.document()
    told = record("cpu", profile_document=setup.profile_document(), options=asked)
    journal = Mock()
    with pytest.raises(UsageError, match="began without one"):
        extend(journal, told, "production", "")
    extend(journal, told, "smoke,extended", "")
    added = journal.append.call_args.kwargs["phases"]
    assert added == [*setup.phases_by_name, "extended"]


def test_what_the_go_chose_may_be_given() -> None:
    swept = phase().model_copy(update={"choices": {"NSA_DDP_BUCKET_MB": "0.5"}})
    exports = {"NSA_DDP_BUCKET_MB": "0.5", "NSA_PREFILL_BATCHED": "1"}
    told_then = {"environment": identity(), "exports": exports, "phases": (swept,)}
    before = record().model_copy(update=told_then)
    # As the lines to export, which stand above the command that launches, have a shell say it.
    for given, told in (("0.5", []), ("1", ["NSA_DDP_BUCKET_MB 0.5 then, 1 now"])):
        variables = {"NSA_DDP_BUCKET_MB": given, "NSA_PREFILL_BATCHED": "1"}
        wanted = earlier.Wanted(
            config={}, variables=variables, given=frozenset({"NSA_DDP_BUCKET_MB"})
        )
        assert earlier.compared(Path(), before, [wanted], []) == (told, set())
