"""What is pinned, and what `runbook nightly` makes of it before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.cli import COMMANDS
from runbook.cli._parser import parse_all
from runbook.config.load import load_profile
from runbook.config.setup import RunOptions, load_nightly
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.machine import git
from tests.cli.shell import inside

NIGHTLY = COMMANDS["nightly"]
ROOT = Path(__file__).parents[2]


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


def test_both_commits_are_kept_in_full_and_asked_for_again(tmp_path: Path) -> None:
    setup = prepare(RunOptions(phases="regression", profile="cpu", reference="HEAD", out=tmp_path))
    sha = git.commit_of(ROOT)
    assert (setup.options.reference, setup.options.head) == (sha, sha)
    line = setup.options.invocation().line(["regression"])
    assert f"--reference {sha} --head {sha}" in line
    kept = setup.options.invocation().options()
    assert (kept["reference"], kept["head"]) == (sha, sha)


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
