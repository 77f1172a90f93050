"""From `runbook init` to a verdict on a trainer without torch, and read where there is no torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from runbook.folder.manifest import folder_problems, load_record
from tests.executed import note
from tests.factory.tables import table
from tests.own.runs import COUNTING, document
from tests.shared import once

# An import of torch is an error here, as where it is not installed.
_NO_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from runbook.cli import main
sys.exit(main(sys.argv[1:]))
"""
_CHECKS = ("completed", "ranks_alive", "loss_finite", "plausible", "accounts")


def runbook(folder: Path, *words: str, torch: bool = True) -> subprocess.CompletedProcess[str]:
    start = ("-m", "runbook") if torch else ("-c", _NO_TORCH)
    done = subprocess.run(
        [sys.executable, *start, *words], cwd=folder, text=True, capture_output=True, check=False
    )
    note(("runbook", *words), done.returncode)
    return done


def _made(folder: Path) -> tuple[Path, list[str]]:
    trainer = f"{sys.executable} {COUNTING} --ranks 2 --steps 9 --out somewhere"
    told = runbook(
        folder, "init", "--trainer", trainer, "--tokens-per-rank", "100", "--profile", "cpu"
    )
    assert told.returncode == 0, told.stderr
    (folder / "init.txt").write_text(told.stdout, "utf-8")
    path = folder / "counting.yaml"
    document = yaml.safe_load(path.read_text("utf-8"))
    (folder / "guessed.json").write_text(json.dumps(document), "utf-8")
    # One launch of one phase is enough here.
    document["phases"]["baseline"] |= {"launches": 1, "steps": 60}
    document["required"] = [f"baseline.{name}" for name in _CHECKS]
    document["trainer"]["env"] = {"TOKENIZERS_PARALLELISM": "false"}
    path.write_text(yaml.safe_dump(document), "utf-8")
    ran = runbook(folder, "run", "--profile", "./counting.yaml", "--phase", "baseline")
    return folder, [str(ran.returncode), ran.stdout, ran.stderr]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a run, and what `runbook run` said of it."""
    return once(tmp_path_factory, "own_run", _made)


@pytest.mark.executes("runbook init")
def test_init_writes_a_profile_that_says_what_it_found(made: tuple[Path, list[str]]) -> None:
    document = json.loads((made[0] / "guessed.json").read_text("utf-8"))
    trainer = document["trainer"]
    command = trainer["command"].replace("'", "")
    assert command.endswith("--ranks {ranks} --steps {steps} --out {out}")
    assert trainer["log"]["path"] == "{out}/metrics.csv"
    assert trainer["log"]["columns"]["loss"] == "train/loss"
    assert trainer["log"]["columns"]["dt_s"] == "dt"
    assert {"baseline.ranks_alive", "baseline.accounts", "long_run.learns"} <= {
        *document["required"]
    }
    assert not {name for name in document["required"] if name.startswith(("nvtx", "sdpa"))}
    said = (made[0] / "init.txt").read_text("utf-8")
    assert "100 tokens a step of a rank, as you say: nothing can check it" in said
    assert "no output folder" not in said and "no number of ranks" not in said


def test_its_run_is_told_by_what_was_read_of_it(made: tuple[Path, list[str]]) -> None:
    run = next((made[0] / "artifacts").glob("*/run.json")).parent
    said = runbook(made[0], "inspect", str(run / "baseline" / "run1")).stdout
    assert "(a trainer of your own has none: its run's report has its numbers)" in said
    assert "  next   runbook verify artifacts/" in made[1][1]
    checks = {c["id"]: c for p in json.loads((run / "run.json").read_text())["phases"]
              for c in p["checks"]}  # fmt: skip
    seen = checks["baseline.ranks_alive"]["measurement"]
    assert (seen["value"], seen["unit"]) == (2, "ranks")
    assert checks["baseline.loss_finite"]["measurement"]["n"] == 60


def test_a_probe_gets_the_variables_of_the_launches(made: tuple[Path, list[str]]) -> None:
    """Without OMP_NUM_THREADS a step of a probe took 15 times as long as one of a launch."""
    known = [json.loads(path.read_text("utf-8")) for path in made[0].rglob("launch.json")]
    assert {one["launch"]["phase"] for one in known} == {"init", "baseline"}
    assert {one["env"]["OMP_NUM_THREADS"] for one in known} == {"1"}


def test_the_verdict_says_what_was_not_checked(made: tuple[Path, list[str]]) -> None:
    code, out, err = made[1]
    said = out + err
    assert code == "0", said
    assert (
        "GO: counting is a trainer of your own, judged from outside by 5 of 76 checks; its data, "
        "model, gradients" in said
    )
    assert "200 tokens a step as declared; function only" in said
    record = json.loads(next((made[0] / "artifacts").glob("*/run.json")).read_text("utf-8"))
    assert record["phases"][0]["launches"][0]["launch"]["own"]["name"] == "counting"
    assert not [name for name in record["exports"] if name.startswith("NSA_")]
    assert record["exports"]["TOKENIZERS_PARALLELISM"] == "false", "what a GO was given for"
    assert "NSA_" not in out


@table(__file__, "readers")
def test_reading_needs_no_torch(made: tuple[Path, list[str]], words: list[str], code: int) -> None:
    run = next((made[0] / "artifacts").glob("*/run.json")).parent
    known = {"RUN": run.name, "DIR": str(run / "baseline" / "run1")}
    told = runbook(made[0], *(known.get(word, word) for word in words), torch=False)
    assert told.returncode == code, told.stdout + told.stderr
    assert "torch" not in told.stderr


def test_what_crashes_in_one_phase_is_not_started_in_the_next(tmp_path: Path) -> None:
    (tmp_path / "counting.yaml").write_text(yaml.safe_dump(document("die")))
    words = ("run", "--profile", "./counting.yaml", "--phase", "baseline,long_run")
    told = runbook(tmp_path, *words)
    assert told.returncode == 1, told.stdout + told.stderr
    cause = "long_run/run is not started: baseline/run1 is the same command and ended badly"
    assert cause in told.stderr
    # It trained for 29 steps, and nobody knows more of what it ran on.
    assert "(no training finished; function only" in told.stdout


@pytest.mark.slow
def test_a_stdout_that_takes_nothing_costs_neither_the_run_nor_its_exit_code(
    made: tuple[Path, list[str]],
) -> None:
    words = ("run", "--profile", "./counting.yaml", "--phase", "baseline", "--out=full")
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "runbook", *words],
            cwd=made[0], text=True, stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    folder = next((made[0] / "full").glob("*/run.json")).parent
    assert folder_problems(folder, load_record(folder)) == []
    assert run.stderr.count("stdout cannot be written (No space left on device)") == 1
    assert f"the run ended with GO; its files are in full/{folder.name}" in run.stderr


AT_EXIT = 'import os; print("terminate called without an active exception", flush=True); os.abort()'
AT_ONCE = r"""
import sys
print("\n".join(f"step {i} loss {9 - i / 30}" for i in range(int(sys.argv[1]))))
"""


@table(__file__, "trials")
def test_a_trial_that_finds_nothing_says_why(
    tmp_path: Path, trainer: str, more: list[str], said: str
) -> None:
    (tmp_path / "at_exit.py").write_text(AT_EXIT)
    (tmp_path / "at_once.py").write_text(AT_ONCE)
    words = ("--profile", "cpu", "--tokens-per-rank", "1", "--trainer", trainer, *more)
    told = runbook(tmp_path, "init", *words)
    assert told.returncode == 2, told.stdout + told.stderr
    assert said in told.stderr
    assert not list(tmp_path.glob("*.yaml"))


# Three slow steps and a fast one, of which it tells a mean since the start.
RUNNING_MEAN = """
import os, sys, time
began, told = time.monotonic(), os.environ.get("TOLD", "lost")
for step in range(1, int(sys.argv[2]) + 1):
    time.sleep(0.06 if step % 4 else 0.02)
    mean = 1000 * (time.monotonic() - began) / step
    print(f"at {step}: {told} {9 - step / 30:.3f} in {mean:.2f}", flush=True)
"""


def test_a_line_of_ones_own_is_read_with_a_variable_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(RUNNING_MEAN)
    pattern = r"at (?P<step>\d+): cost (?P<loss>\S+) in (?P<dt_ms>\S+)"
    words = ("init", "--profile", "cpu", "--tokens-per-rank", "1", "--trainer",
             "python t.py --steps 30", "--pattern", pattern)  # fmt: skip
    missed = runbook(tmp_path, *words)
    assert missed.returncode == 2 and "console: 0 rows" in missed.stderr
    told = runbook(tmp_path, *words, "--env", "TOLD=cost")
    assert told.returncode == 0, told.stderr
    assert "left out: its dt_ms, a mean since the first step by this program's clock" in told.stdout
    profile = yaml.safe_load((tmp_path / "t.yaml").read_text("utf-8"))
    assert profile["trainer"]["env"] == {"TOLD": "cost"}
    assert profile["trainer"]["log"]["pattern"] == pattern.replace("?P<dt_ms>", "?:")
    assert not [name for name in profile["required"] if name.endswith(".accounts")]


@pytest.mark.parametrize(
    "words",
    [
        ("init", "--tokens-per-rank", "1", "--trainer", "t {steps}", "--env", "TOLD=x"),
        ("run", "--dry-run"),
    ],
)
def test_what_of_a_shell_no_launch_gets_is_said(
    made: tuple[Path, list[str]], tmp_path: Path, words: tuple[str, ...]
) -> None:
    shell = {"WANDB_MODE": "offline", "TOLD": "y", "HF_HOME": "/tmp", "PATH": os.environ["PATH"]}
    profile = "cpu" if "init" in words else str(made[0] / "counting.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "runbook", *words, "--profile", profile],
        cwd=tmp_path, text=True, capture_output=True, check=False, env=shell,
    )  # fmt: skip
    names = "WANDB_MODE" if "init" in words else "TOLD, WANDB_MODE"
    assert re.search(rf"(not passed on:|without ) {names}: no launch", done.stdout + done.stderr)


def test_a_profile_that_is_there_is_kept(made: tuple[Path, list[str]]) -> None:
    before = (made[0] / "counting.yaml").read_text("utf-8")
    told = runbook(
        made[0], "init", "--trainer", f"python {COUNTING} --steps 5", "--tokens-per-rank", "1"
    )
    assert told.returncode == 2 and "counting.yaml is there already" in told.stderr
    assert (made[0] / "counting.yaml").read_text("utf-8") == before


@table(__file__, "refused_of_a_foreign_trainer")
def test_what_only_our_trainer_has_is_refused(
    made: tuple[Path, list[str]], words: list[str], said: str
) -> None:
    run = next((made[0] / "artifacts").glob("*/run.json")).parent
    typed = [str(run) if word == "RUN" else word for word in words]
    profile = [] if "triage" in words else ["--profile", "./counting.yaml"]
    told = runbook(made[0], *typed, *profile, "--dry-run")
    assert told.returncode == 2 and said in told.stderr, told.stdout + told.stderr
