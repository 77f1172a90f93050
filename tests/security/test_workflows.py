"""Workflows and the action: the few things that zizmor, which reads them, does not ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
ACTION = ROOT / "action.yml"
# What the jobs that publish a release may do; every other one may read the repository.
MORE = {("release", "publish"): {"id-token": "write", "attestations": "write"}}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.stem)
def test_each_job_has_a_time_limit_and_only_the_permissions_that_it_names(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["permissions"] == {}
    for name, job in document["jobs"].items():
        # A night ends before the next one begins.
        assert job["timeout-minutes"] <= (24 * 60 if path.stem == "nightly-gpu" else 240)
        assert job["permissions"] == MORE.get((path.stem, name), {"contents": "read"})


def used(path: Path) -> dict[str, str]:
    """Actions that a file uses, each with the rest of its line."""
    lines = re.findall(r"uses: (\S+?)@(.*)", path.read_text(encoding="utf-8"))
    assert lines
    return dict(lines)


def test_every_action_is_one_commit_and_the_same_everywhere() -> None:
    commits: dict[str, set[str]] = {}
    for path in [*FOLDER.glob("*.yml"), ACTION]:
        for action, rest in used(path).items():
            assert re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", rest), f"{path.name}: {action}"
            commits.setdefault(action, set()).add(rest)
    assert {action for action, rests in commits.items() if len(rests) > 1} == set()


def test_what_gets_an_identity_runs_nothing_of_the_repository() -> None:
    jobs = yaml.safe_load((FOLDER / "release.yml").read_text(encoding="utf-8"))["jobs"]
    for step in jobs["publish"]["steps"]:
        assert step.keys() <= {"uses", "with"}
        assert "checkout" not in step["uses"] and "password" not in step["with"]
    assert jobs["publish"]["needs"] == "build"


def test_the_nightly_fetches_the_pinned_commit_and_gets_the_signal_of_a_cancelled_job() -> None:
    text = (FOLDER / "nightly-gpu.yml").read_text(encoding="utf-8")
    assert "fetch-depth: 0" in text
    assert 'run: exec "$RUNNER_TEMP/venv/bin/runbook" nightly ' in text
