"""The nightly's workflow: how long it may take, and that a night sees the nights before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runbook.config.setup import RunOptions, load_nightly
from runbook.engine.plan.prepare import prepare
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
