"""Commands of launches: what is executed, and what is printed to be pasted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.config.precedence import config_name
from runbook.errors import RunbookError, UsageError
from runbook.files import data_path
from runbook.launch.command import (
    Command,
    build_command,
    build_environment,
    keep_config,
    pasteable,
    resolve_config,
)
from runbook.launch.watch.watchdog import Budgets
from runbook.records import ArmSchedule, Launch
from tests.executed import note
from tests.factory.programs import git, program
from tests.launch.helpers import run, trainer


def test_torchrun_is_this_python_on_loopback_and_a_free_port(tmp_path: Path) -> None:
    command = build_command(
        trainer("torchrun", "--nproc_per_node=2", "-m", "nsa.train", "--steps", "300"), tmp_path
    )
    assert command.argv[:3] == (sys.executable, "-m", "nsa.loopback") and command.is_ours
    assert "--local-addr=127.0.0.1" in command.argv and "--log-dir=/dev/null" in command.argv
    assert f"--rdzv-endpoint=127.0.0.1:{command.port}" in command.argv
    assert command.argv[-5:] == ("--nproc_per_node=2", "-m", "nsa.train", "--steps", "300")


def test_only_what_is_installed_is_kept_from_the_folder_of_the_caller() -> None:
    """Which may have an `nsa/` or a `pytest.py` of its own."""
    how = {"token": "ab", "run_dir": Path("/runs/x"), "loopback": False}
    for line, ours in (
        ("python -m torch.distributed.run -m nsa.train --ddp 1", True),
        ("python -m pytest -q --pyargs nsa.tests.test_modes", True),
        ("python -m nsa.loopback -m my_trainer", False),
        ("python train.py", False),
    ):
        command = Command(argv=tuple(line.split()), env={}, port=None, steps=1)
        assert ("PYTHONSAFEPATH" in build_environment({}, command, **how)) is ours


def test_only_python_and_torchrun_are_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="allowed are torchrun and python"):
        build_command(trainer("bash", "-c", "true"), tmp_path)


def test_a_shipped_config_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = trainer("python", "-m", "nsa.train", env={"CONFIG": "configs/cpu_smoke.yaml"})
    assert Path(build_command(launch, tmp_path).env["CONFIG"]).is_file()
    for name in ("configs/nothing.yaml", "configs/../pyproject.toml", "/etc/nothing"):
        with pytest.raises(RunbookError, match="no trainer config"):
            build_command(trainer("python", "--config", name), tmp_path)


def test_a_config_of_the_same_name_in_the_folder_of_the_caller_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another clone, with its own edits; typed, it is named by its whole path."""
    ours, name = data_path("configs") / "cpu_smoke.yaml", "configs/cpu_smoke.yaml"
    (tmp_path / "configs").mkdir()
    for place in (name, "cpu_smoke.yaml"):
        (tmp_path / place).write_text(ours.read_text().replace("lr: 3.0e-3", "lr: 1.0"))
    monkeypatch.chdir(tmp_path)
    planned = trainer("python", "-m", "nsa.train", "--config", name)
    assert str(ours) in build_command(planned, tmp_path).argv
    assert f"--config {ours}" in pasteable(planned).line
    for typed in (name, "cpu_smoke.yaml"):
        assert resolve_config(typed) == ours.resolve()
        assert config_name(typed) == str(tmp_path / typed)
    assert resolve_config(config_name(name)) == tmp_path / name


# -- the printed line, executed --------------------------------------------------------------------


def paste(launch: Launch, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the printed line in a shell, as a person would who has this Python on the PATH."""
    programs = folder / "bin"
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        program(programs / name, f'exec {sys.executable} {words} "$@"')
    keep = ("PATH", "HOME", "PYTHONPATH")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["bash", "-c", pasteable(launch).line],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


TINY = {"train.seq_len": 32, "train.lr": 2e-05, "model.n_layers": 1, "runtime.use_flash": False}
STEPS = ("--dataset", "synthetic", "--steps", "2")
START = ("-m", "nsa.train", "--config", "configs/cpu_smoke.yaml")
ARMS = ArmSchedule(
    settings={"a b": {"NSA_OPT_FUSED": "0"}, "c": {"NSA_OPT_FUSED": "1"}},
    rounds=(("a b", "c"),),
    steps=1,
    warmup_steps=0,
)
KINDS = {
    "config of the plan": trainer(
        "python", "-m", "nsa.train", "--ddp", "0", *STEPS, config="configs/cpu_smoke.yaml",
    ),
    "arms on two ranks": trainer(
        "torchrun", "--nproc_per_node=2", *START, "--ddp", "1", "--dataset", "synthetic",
        schedule=ARMS,
    ),
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_pasted_line_is_the_same_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    nproc = 2 if KINDS[kind].argv[0] == "torchrun" else 1
    changes = {"nproc": nproc, "steps": 2, "timeout_s": 120, "config_overrides": TINY}
    launch = KINDS[kind].model_copy(update=changes)
    assert run(launch, tmp_path, budgets=Budgets()).ok
    done = paste(launch, tmp_path)
    assert done.returncode == 0, done.stderr
    (pasted,) = {path.resolve() for path in (tmp_path / "artifacts").rglob("env.json")}
    wanted, found = (json.loads(p.read_text()) for p in (tmp_path / "x" / "env.json", pasted))
    for key in ("config_sha256", "config", "effective", "world_size", "arms"):
        assert found[key] == wanted[key], key
    assert found["config"]["train"]["lr"] == 2e-05


def test_a_config_that_is_edited_while_a_run_goes_on_changes_nothing(tmp_path: Path) -> None:
    mine, run = tmp_path / "mine.yaml", tmp_path / "run"
    text = (data_path("configs") / "cpu_smoke.yaml").read_text()
    mine.write_text(text)
    launch = trainer("python", "-m", "nsa.train", "--config", str(mine))
    keep_config(run, str(mine))
    mine.write_text(text.replace("lr: ", "lr: 9"))
    keep_config(run, str(mine))
    argv = build_command(launch, run / "smoke" / "run", run_root=run).argv
    read = Path(argv[argv.index("--config") + 1])
    assert read.is_relative_to(run) and read.name == "mine.yaml" and read.read_text() == text
    assert build_command(launch, run, run_root=tmp_path).argv[-1] == str(mine), "it has no copy"


@pytest.mark.executes("git clone", "git -C")
def test_the_printed_checkout_of_another_commit_is_made_by_a_shell(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    for text in ("then", "now"):
        (tmp_path / "which").write_text(text)
        git(tmp_path, "add", "which")
        git(tmp_path, "commit", "--quiet", "--message", text)
    then = git(tmp_path, "rev-parse", "HEAD~1")
    launch = trainer("python", "-m", "nsa.train", "--steps", "1", commit=then)
    (line,) = (printed := pasteable(launch)).notes
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for half in line.split(" && "):
        note(half)
    inside = printed.line.partition(" && ")[0] + " && cat which)"
    told = subprocess.check_output(["bash", "-c", inside], cwd=tmp_path, text=True)
    assert told == "then"
