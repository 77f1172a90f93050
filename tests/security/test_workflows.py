"""The workflows as zizmor reads them, and the few things that it does not ask for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / ".github/workflows"
ZIZMOR = Path(sys.executable).with_name("zizmor")
HARMFUL = """\
on: pull_request
jobs:
  one:
    runs-on: ubuntu-24.04
    steps:
      - uses: actions/checkout@v4
      - run: echo ${{ github.event.pull_request.title }}
"""


def found(path: Path) -> subprocess.CompletedProcess[str]:
    command = [ZIZMOR, "--offline", "--quiet", "--persona=pedantic", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not ZIZMOR.is_file(), reason="zizmor is not installed here")
def test_zizmor_finds_nothing_in_them_and_something_in_a_harmful_one(tmp_path: Path) -> None:
    ours = found(FOLDER)
    assert ours.returncode == 0, ours.stdout
    (tmp_path / "harmful.yml").write_text(HARMFUL)
    harmful = found(tmp_path / "harmful.yml")
    assert harmful.returncode != 0
    for audit in ("template-injection", "unpinned-uses", "excessive-permissions", "artipacked"):
        assert audit in harmful.stdout


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.stem)
def test_each_job_has_a_time_limit_and_only_the_permissions_that_it_names(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["permissions"] == {}
    for job in document["jobs"].values():
        assert job["timeout-minutes"] <= 240
        assert job["permissions"] == {"contents": "read"}


def test_the_nightly_fetches_the_pinned_commit_and_gets_the_signal_of_a_cancelled_job() -> None:
    text = (FOLDER / "nightly-gpu.yml").read_text(encoding="utf-8")
    assert "fetch-depth: 0" in text
    assert 'run: exec "$RUNNER_TEMP/venv/bin/runbook" nightly ' in text
