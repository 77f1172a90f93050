"""Each printed `runbook run` line asks for the same experiment again: executed as a dry run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.records.run import Invocation
from tests.cli.shell import inside

SETTINGS = ("NSA_DDP_COMPRESS=off", "train.lr=1e-3", "train.seed=7")


def own_profile(folder: Path) -> Path:
    path = folder / "our machine.yaml"
    path.write_text("extends: cpu\nname: ours\n", encoding="utf-8")
    return path


def plan_of(line: str, folder: Path) -> dict[str, Any]:
    """What the line would run, asked in a folder of its own: the launches, word for word."""
    words = shlex.split(line)
    assert words[:2] == ["runbook", "run"]
    done = inside(*words[1:], "--dry-run", "--json", cwd=folder)
    assert done.code == 0, done.err
    return {phase["name"]: phase["launches"] for phase in json.loads(done.out)["phases"]}


def test_a_command_is_the_same_when_the_run_is_judged_again(tmp_path: Path) -> None:
    """However a value was typed: else `verify` finds every rerun line changed."""
    typed = ("train.lr=1e6", "NSA_DDP_COMPRESS=off", "runtime.gradient_checkpointing=true")
    setup = prepare(asked(tmp_path, settings=typed))
    options = setup.options.document()
    again = Invocation.recorded("cpu", setup.settings.texts(), options)
    assert setup.context({}).rerun("baseline") == again.line(["baseline"])


def asked(tmp_path: Path, **changes: Any) -> RunOptions:
    return RunOptions(phases="bucket_sweep", profile="cpu", out=tmp_path / "runs", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"settings": SETTINGS},
        {"protocol": "launches", "steps_scale": 0.5},
        {"aa": True, "seed": 3},
        {"gpu_hour_price": 2.5},
    ],
    ids=["plain", "settings", "protocol", "aa", "price"],
)
def test_the_line_plans_the_same_launches(changes: dict[str, Any], tmp_path: Path) -> None:
    options = asked(tmp_path, **changes)
    setup = prepare(options)
    wanted = [launch.model_dump(mode="json") for launch in setup.phases[0].plan(setup.context({}))]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    line = setup.context({}).rerun("bucket_sweep")
    got = plan_of(line, elsewhere)["bucket_sweep"]
    assert [{key: one[key] for key in wanted[0]} for one in got] == wanted
    assert f"--out {options.out}" in line


def test_a_profile_of_ones_own_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own_profile(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = replace(asked(tmp_path), profile=f"./{path.name}", settings=SETTINGS[:1])
    line = prepare(options).context({}).rerun("baseline")
    monkeypatch.chdir("/")
    assert shlex.quote(str(path)) in line
    assert "baseline" in plan_of(line, Path("/"))
