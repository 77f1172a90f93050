"""The nightly: its clean checkouts, how long its job may take, and nights for real."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsa.contract.digests import package_digest
from runbook.cli import COMMANDS
from runbook.cli._parser import parse_all
from runbook.config.load import load_profile
from runbook.config.setup import RunOptions, load_nightly
from runbook.engine.plan.prepare import prepare
from runbook.errors import ProgramExit, UsageError
from runbook.folder.manifest import folder_problems, load_record
from runbook.launch import command as commits
from runbook.machine.git import commit_of
from runbook.process import carriers
from runbook.records import Outcome, RunRecord
from tests.cli.shell import environment, inside
from tests.engine.test_interrupt_and_resume import wait_for
from tests.executed import note
from tests.factory.programs import git, program

ROOT = Path(__file__).parents[2]
JOB: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/nightly-gpu.yml").read_text())[
    "jobs"
]["runbook"]
STEPS = {step["name"]: step for step in JOB["steps"] if "name" in step}
NIGHT = STEPS["Run the night"]["run"]
AN_HOUR = 60


def test_the_job_has_time_for_every_launch_that_a_night_is_sure_to_have(tmp_path: Path) -> None:
    words = NIGHT.split()
    until_s = float(words[words.index("--preserve-status") + 1])
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
    short = '[ "$1" != nightly ] || set -- "$@" --reference HEAD'
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
        done = shell(NIGHT.replace(" 54000 ", " 20 "))
        assert done.returncode == 143, done.stdout + done.stderr
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
    limit = "timeout --foreground --preserve-status 20"
    resumed = shell(f"{limit} {sys.executable} -m runbook nightly {first}")
    assert resumed.returncode == 143 and nights[0].name in resumed.stderr, resumed.stderr


NIGHTLY = COMMANDS["nightly"]


def problems(*words: str) -> list[str]:
    args, found = parse_all(NIGHTLY.parser(), list(words))
    return [*found, *NIGHTLY.problems(args)]


def test_the_pinned_commit_is_one_of_this_repository_and_its_profile_has_gpus() -> None:
    pinned = load_nightly()
    assert load_profile(pinned.profile).has_gpu
    if commit_of(ROOT, "HEAD~50") is None:
        pytest.skip("a shallow clone, or none, has no older commits")
    assert commit_of(ROOT, pinned.reference) == pinned.reference


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
    sha = commit_of(ROOT) or ""
    assert f"checkout --detach {sha}" in done.out
    assert f"(cd checkouts/{sha[:12]} && PYTHONPATH=$PWD " in done.out
    assert "round18_reference" in done.out and "only if they are needed" in done.out
    assert not (tmp_path / "out").exists()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    (folder / "nsa").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for text in ("one", "two"):
        (folder / "nsa/__init__.py").write_text(f"NAME = {text!r}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", text)
    # Not a checkout of this program: what is tested is whose files lie there afterwards.
    monkeypatch.setattr(commits, "find_checkout", lambda: folder)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run/regression/round01_head"
    folder.mkdir(parents=True)
    return folder


def test_an_older_commit_lies_there_whatever_the_repository_has_now(
    repository: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hook runs, not even one that its user has for all repositories."""
    hook = program(repository / ".git/hooks/post-checkout", f"touch {tmp_path}/ran")
    (tmp_path / ".gitconfig").write_text(f"[core]\nhooksPath = {hook.parent}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    older = git(repository, "rev-parse", "HEAD~1")
    (repository / "nsa/__init__.py").write_text("NAME = 'not committed'\n")
    before = git(repository, "status", "--porcelain")
    folder = commits.check_out(older, run_dir.parents[1], run_dir)
    assert (folder / "nsa/__init__.py").read_text() == "NAME = 'one'\n"
    told = json.loads((run_dir / "checkout.json").read_text())
    assert (told["commit"], told["sha"], told["changed"]) == (older, older, [])
    assert told["sha256"] == package_digest(folder / "nsa")
    assert told["path"] == str(folder / "nsa")
    # Nothing is left in the repository: neither a worktree nor another state.
    assert git(repository, "status", "--porcelain") == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_what_a_crash_left_is_made_again(repository: Path, run_dir: Path) -> None:
    sha, root = git(repository, "rev-parse", "HEAD"), run_dir.parents[1]
    folder = commits.check_out(sha, root, run_dir)
    git(folder, "update-index", "--skip-worktree", "nsa/__init__.py")
    (folder / "nsa/__init__.py").write_text("NAME = 'edited'\n")
    assert commits.check_out(sha, root, run_dir) == folder
    assert (folder / "nsa/__init__.py").read_text() == "NAME = 'two'\n"
    commits.remove_checkouts(root)
    assert not (root / commits.CHECKOUTS).exists()
    commits.remove_checkouts(root)


def test_the_digest_is_of_names_and_contents_of_python_and_yaml_and_of_what_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.py").write_text("x")
    first = package_digest(tmp_path)
    cache = py_compile.compile(str(tmp_path / "a.py"))
    assert package_digest(tmp_path) == first
    (other := tmp_path / "other").write_text("y")
    shutil.copystat(tmp_path / "a.py", other)
    py_compile.compile(str(other), cfile=cache)
    assert package_digest(tmp_path) != first
    shutil.rmtree(tmp_path / "__pycache__")
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_text("x")
    assert package_digest(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert package_digest(tmp_path) != first
    (tmp_path / "b.py").rename(tmp_path / "a.py")
    (tmp_path / "a.yaml").write_text("x")
    assert package_digest(tmp_path) != first


LOOP = "nsa/train/loop.py"
ANCHOR = "        posted = self._post(outcome)\n"
# The reference is so much slower that no loss of HEAD can be suspected: the night stays short.
SLOWER = """\
        if self.step == 1:
            print("MARKER of the reference", flush=True)
        until = process_time() + 0.05
        while process_time() < until:
            pass
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This program as committed, in which the commit before HEAD is slower and says so."""
    folder = tmp_path_factory.mktemp("night") / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    path = folder / LOOP
    text = path.read_text()
    assert text.count(ANCHOR) == 1
    for content in (text.replace(ANCHOR, SLOWER + ANCHOR), text):
        path.write_text(content)
        git(folder, "commit", "--quiet", "--all", "--message", "another trainer")
    return folder


def start(clone: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "runbook", "nightly", "--quiet", *words],
        cwd=clone,
        env=environment(PYTHONPATH=str(clone), OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.executes("runbook nightly")
def test_a_cancelled_night_is_readable_and_goes_on_with_each_sides_own_code(
    clone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "artifacts"
    what = ("--phase", "regression", "--profile", "cpu", "--reference", "HEAD~1")
    night = start(clone, *what, "--steps-scale", "0.25", "--out", str(out))
    beats = wait_for(out, "*/regression/round02_*/heartbeat_rank0.jsonl")
    folder = beats.parents[2]
    night.send_signal(signal.SIGTERM)
    assert night.wait(timeout=60) == 143
    tokens = [json.loads(one.read_text())["run_token"] for one in out.rglob("launch.json")]
    assert [pid for token in tokens for pid in carriers(token)] == []
    cut = RunRecord.model_validate_json((folder / "run.json").read_text())
    assert cut.interrupted and not (folder / commits.CHECKOUTS).exists()
    assert folder_problems(folder, load_record(folder)) == []

    words = ("--resume", str(folder), "--out", str(out))
    code = start(clone, *words).wait(timeout=500)
    note(("runbook", "nightly", *words), code)
    record = RunRecord.model_validate_json((folder / "run.json").read_text())
    (phase,) = [one for one in record.phases if one.name == "regression"]
    wrong = [f"{one.id}: {one.reason}" for one in phase.checks if one.outcome is not Outcome.PASS]
    assert wrong == []
    assert code in (ProgramExit.INCOMPLETE, ProgramExit.PARTIAL)
    sides = {"reference": "HEAD~1", "head": "HEAD"}
    shas = {side: git(clone, "rev-parse", name) for side, name in sides.items()}
    for entry in phase.launches:
        side = entry.launch.name.partition("_")[2]
        console = (folder / entry.launch.run_dir / "console.log").read_text()
        assert ("MARKER" in console) is (side == "reference")
        env = json.loads((folder / entry.launch.run_dir / "env.json").read_text())
        assert env["git"]["sha"] == entry.launch.commit == shas[side]
    assert len(phase.launches) == 6, "no loss was suspected, so no more rounds were run"
    assert git(clone, "status", "--porcelain") == ""
    assert not (folder / commits.CHECKOUTS).exists()
