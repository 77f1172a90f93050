"""The nightly: how long its job may take, what is pinned, and that a night sees the last one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runbook.cli import COMMANDS
from runbook.cli._parser import parse_all
from runbook.config.load import load_profile
from runbook.config.setup import RunOptions, load_nightly
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.machine import git
from tests.cli.shell import inside
from tests.factory.programs import program

ROOT = Path(__file__).parents[2]
JOB: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/nightly-gpu.yml").read_text())[
    "jobs"
]["runbook"]
STEPS = {step["name"]: step for step in JOB["steps"] if "name" in step}
NIGHT = STEPS["Run the night"]["run"]
AN_HOUR = 60


def test_the_job_has_time_for_every_launch_that_a_night_is_sure_to_have(tmp_path: Path) -> None:
    words = NIGHT.split()
    until_s = float(words[words.index("--until-s") + 1])
    setup = prepare(
        RunOptions(
            phases="all,regression", profile=load_nightly().profile, reference="HEAD", out=tmp_path
        )
    )
    sure = [launch.timeout_s for launch in setup.planned if not launch.conditional]
    assert 0 < sum(sure) <= until_s
    assert JOB["timeout-minutes"] == until_s / 60 + AN_HOUR < 24 * 60


@pytest.mark.slow
@pytest.mark.e2e
def test_a_night_after_a_clean_checkout_sees_the_night_before(tmp_path: Path) -> None:
    """The workflow's own steps; each night is cut off in its first seconds, and is a run."""
    clone, home, temporary = (tmp_path / name for name in ("clone", "home", "temporary"))
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    home.mkdir()
    short = '[ "$1" != nightly ] || set -- "$@" --until-s 1 --reference HEAD'
    script = f'{short}\nexec {sys.executable} -m runbook "$@"'
    program(temporary / "venv/bin/runbook", script)
    variables = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(home),
        "RUNNER_TEMP": str(temporary),
        "PYTHONPATH": str(clone),
        "PROFILE": "cpu",
        "NIGHTS": "",
        "GITHUB_OUTPUT": str(tmp_path / "outputs"),
    }

    def shell(line: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-e", "-c", line]
        return subprocess.run(
            command, cwd=clone, env=variables | more, capture_output=True, text=True, check=False
        )

    nights = []
    for _ in range(2):
        (tmp_path / "outputs").unlink(missing_ok=True)
        done = shell(NIGHT)
        assert done.returncode == 3, done.stdout + done.stderr
        told = dict(line.split("=", 1) for line in (tmp_path / "outputs").read_text().splitlines())
        nights.append(Path(told["run"]))
        checked = shell(
            STEPS["Check every number again from the artifacts"]["run"], NIGHT=told["run"]
        )
        assert checked.returncode == 0, checked.stdout
        # As actions/checkout does it before the next night.
        subprocess.run(["git", "-C", clone, "clean", "-ffdxq"], check=True)
    out = nights[0].parent
    assert not out.is_relative_to(clone)
    listed = shell(f'"$RUNNER_TEMP/venv/bin/runbook" history --out {out}').stdout
    assert all(night.name in listed for night in nights) and nights[0] != nights[1]
    first = f"--out {out} --resume {nights[0].name}"
    resumed = shell(f"{sys.executable} -m runbook nightly --until-s 1 {first}")
    assert resumed.returncode == 3 and nights[0].name in resumed.stderr, resumed.stderr


NIGHTLY = COMMANDS["nightly"]


def problems(*words: str) -> list[str]:
    args, found = parse_all(NIGHTLY.parser(), list(words))
    return [*found, *NIGHTLY.problems(args)]


def test_the_pinned_commit_is_one_of_this_repository_and_its_profile_has_gpus() -> None:
    pinned = load_nightly()
    assert load_profile(pinned.profile).has_gpu
    if git.commit_of(ROOT, "HEAD~50") is None:
        pytest.skip("a shallow clone, or none, has no older commits")
    assert git.commit_of(ROOT, pinned.reference) == pinned.reference


def test_a_night_names_its_machine_and_needs_commits_that_exist(tmp_path: Path) -> None:
    assert "a night names its machine" in problems("--profile", "auto")[0]
    (wrong,) = problems("--profile", "cpu", "--reference", "nosuch", "--out", str(tmp_path))
    assert "--reference nosuch: no such commit" in wrong
    with pytest.raises(UsageError, match="needs --reference COMMIT"):
        prepare(RunOptions(phases="regression", profile="cpu", out=tmp_path))


@pytest.mark.executes("runbook nightly --dry-run")
def test_the_dry_run_prints_both_checkouts_and_starts_nothing(tmp_path: Path) -> None:
    done = inside(
        *("nightly", "--phase", "regression", "--profile", "cpu", "--reference", "HEAD"),
        *("--dry-run", "--out", str(tmp_path / "out")),
        cwd=ROOT,
    )
    assert done.code == 0, done.err
    sha = git.commit_of(ROOT) or ""
    assert f"checkout --detach {sha}" in done.out
    assert f"(cd checkouts/{sha[:12]} && PYTHONPATH=$PWD " in done.out
    assert "round18_reference" in done.out and "only if they are needed" in done.out
    assert not (tmp_path / "out").exists()
