"""What may leave, enter and be touched: sockets, variables, folders, shells, other processes."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook.errors import UsageError
from runbook.folder.facts import REDACTED
from runbook.launch import run_launch
from runbook.launch.command import Command, build_environment
from runbook.launch.observer import Observer
from runbook.launch.supervision import LaunchOptions
from runbook.process import carriers, environment_holds, kill_all, signal_owned
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.tools.drill import FAULTS
from runbook.tools.drill.scene import drill_launch
from tests.cli.shell import environment
from tests.factory.programs import git
from tests.launch.helpers import At, fake_launch
from tests.shared import crowded, once

ROOT = Path(__file__).parents[2]
CANARY = "canary-31d0c5e7f2"
# Where it ran, how it ended, how many processes it had, and on which addresses they listened.
Crashed = tuple[Path, LaunchResult, int, set[str]]
SECRETS = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "NCCL_AUTH_TOKEN", "DB_PASSWORD")


def _listening(pids: list[int]) -> Iterator[str]:
    inodes = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").rstrip("]"))
    for table in Path("/proc/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                yield fields[1].partition(":")[0]


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Crashed:
    """A real run that crashes at step 60, on a machine whose environment is full of secrets."""
    return once(tmp_path_factory, "crashed", _crashed)


def _crashed(root: Path) -> Crashed:
    launch = drill_launch(FAULTS["exception"], name="run")
    argv = tuple("60" if word == "6" else word for word in launch.argv)
    env = {"NSA_PREFILL_BATCHED": "1", "HF_TOKEN": CANARY}
    machine = {**os.environ, "OMP_NUM_THREADS": "1", **dict.fromkeys(SECRETS, CANARY)}
    machine |= {"LD_PRELOAD": "/nowhere.so", "PYTHONSTARTUP": "/nowhere.py", "NSA_LR": "9"}
    seen: list[int] = []
    listening: set[str] = set()

    def look(_: Launch) -> None:
        token = json.loads((root / "run" / "launch.json").read_text())["run_token"]
        seen.extend(carriers(token))
        listening.update(_listening(seen))

    how = LaunchOptions(run_root=root, observer=At(4, look), retry=False, machine=machine)
    result = run_launch(launch.model_copy(update={"argv": argv, "env": env}), how)
    return root, result, len(seen), listening


@pytest.mark.e2e
@pytest.mark.slow
def test_the_rendezvous_listens_on_the_loopback_only(crashed: Crashed) -> None:
    _, _, processes, listening = crashed
    assert processes >= 3  # torchrun and two ranks
    assert listening == {"0100007F"}  # 127.0.0.1, as the kernel writes it


@pytest.mark.e2e
def test_the_canary_is_in_no_byte_of_a_crashed_run(crashed: Crashed) -> None:
    root, result, *_ = crashed
    assert (result.status, result.culprit_rank) == (LaunchStatus.CRASHED, 1)
    assert CANARY not in result.model_dump_json()
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert CANARY.encode() not in path.read_bytes(), path
    assert json.loads((root / "run" / "launch.json").read_text())["env"]["HF_TOKEN"] != CANARY


@pytest.mark.e2e
def test_artifacts_are_for_their_owner_only(crashed: Crashed) -> None:
    folders = {path: path.stat().st_mode for path in crashed[0].rglob("*") if path.is_dir()}
    assert folders and not [path for path, mode in folders.items() if mode & 0o077]


def test_only_listed_variables_reach_a_launch(tmp_path: Path) -> None:
    others = ("LD_PRELOAD", "PYTHONSTARTUP", "BASH_ENV", "NSA_DDP_BUCKET_MB", "NCCL_DEBUG")
    machine = dict.fromkeys((*SECRETS, *others), "x")
    listed = {"PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/cuda"}
    listed |= {"CUDA_VISIBLE_DEVICES": "0,1"}
    planned = {"NSA_OPT_FUSED": "1", "NCCL_ALGO": "Ring"}
    how = {"token": "ab", "run_dir": tmp_path, "loopback": True}
    command = Command(argv=(), env=planned, port=None, steps=1)
    made = build_environment(machine | listed, command, **how)
    assert made == listed | planned | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RUNBOOK_RUN_TOKEN": "ab",
        "RUNBOOK_RUN_DIR": str(tmp_path),
    }
    refused = ("LD_PRELOAD", "PATH", "PYTHONPATH", "RUNBOOK_RUN_TOKEN", "BASH_ENV")
    with pytest.raises(UsageError) as error:
        planned = {**dict.fromkeys(refused, "x"), "NSA_NVTX": "1"}
        build_environment({}, replace(command, env=planned), **how)
    assert len(error.value.problems) == len(refused)
    for name in refused:
        assert f"may not set {name}" in str(error.value)


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", ".", "a/../..", "link/run"])
def test_a_launch_stays_in_its_runs_folder(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    launch = fake_launch().model_copy(update={"run_dir": name})
    with pytest.raises(UsageError, match="leaves the run's folder"):
        run_launch(launch, LaunchOptions(run_root=root, observer=Observer()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


@cache
def _sources() -> list[tuple[Path, ast.Module]]:
    packages = ("nsa", "runbook", "phases", "reports")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return [(path, ast.parse(path.read_text())) for path in files]


def test_there_is_no_shell_and_no_unsafe_loading() -> None:
    forbidden = {"system", "popen", "getoutput", "getstatusoutput", "unsafe_load", "full_load"}
    for path, tree in _sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            called = name if owner in ("os", "subprocess", "yaml", "") else ""
            assert called not in forbidden, f"{path}:{node.lineno}"
            shell = [k for k in node.keywords if k.arg == "shell"]
            assert not shell, f"{path}:{node.lineno}"


def test_processes_are_never_found_by_name() -> None:
    """The origin's `pgrep -f train` also matched torchrun, editors and other people's runs."""
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.split()
                assert not {"pkill", "killall", "pgrep"} & set(words[:1]), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr != "process_iter", f"{path}:{node.lineno}"


def test_only_our_token_is_ever_killed() -> None:
    def sleeper(token: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        return subprocess.Popen(command, env={**os.environ, RUN_TOKEN_VARIABLE: token})

    with sleeper("aa" * 8) as ours, sleeper("bb" * 8) as other:
        time.sleep(0.3)
        assert signal_owned(other.pid, "aa" * 8, 9) is False
        assert kill_all("aa" * 8) == []
        assert ours.wait(5) == -9
        assert other.poll() is None and carriers("bb" * 8) == [other.pid]
        assert not environment_holds(other.pid, "bb" * 7), "a part of it is none"
        assert signal_owned(other.pid, "bb" * 8, 9) is True
        assert other.wait(5) == -9
        assert signal_owned(other.pid, "bb" * 8, 9) is False, "it is gone"


IN_ENVIRONMENT = "canary-env-8d1f6b20"
IN_DIFF = "canary-diff-55e0c7a9"


def _checkout(folder: Path) -> Path:
    """A copy of the packages as a checkout of its own, with secrets in what is not committed."""
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in ("nsa", "runbook", "phases", "reports", "configs", "templates"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "deploy.env").write_text("REGION=north\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(folder, *words)
    (folder / "deploy.env").write_text(
        f'REGION=north\nDB_PASSWORD="{IN_DIFF}"\nservice_api_key: {IN_DIFF}\n'
        f"the value {IN_ENVIRONMENT} of a variable, quoted in passing\n"
    )
    return folder


@pytest.mark.e2e
@pytest.mark.slow
def test_no_canary_in_any_byte_of_a_run(tmp_path: Path) -> None:
    checkout = _checkout(tmp_path / "checkout")
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    words = ["run", "--profile", "cpu", "--phase", "preflight,single_gpu", "--steps-scale", "0.02"]
    words += ["--protocol", "single"]
    words += ["--out", str(tmp_path / "x" / ".." / "link")]
    environ = environment(OMP_NUM_THREADS="1", **dict.fromkeys(SECRETS, IN_ENVIRONMENT))

    def runbook(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "runbook", *words]
        return subprocess.run(
            command,
            cwd=checkout,
            env=environ,
            capture_output=True,
            text=True,
            timeout=crowded(240),
        )

    done = runbook(*words)
    assert done.returncode in (1, 3), done.stdout + done.stderr
    # Link and dots are resolved before anything is made; `latest` leads to the newest launch.
    (run_root,) = (path for path in target.iterdir() if not path.is_symlink())
    shown = runbook("report", str(run_root), "--format", "details")
    files = [path for path in run_root.rglob("*") if path.is_file()]
    assert {"run.json", "git_diff.patch", "report.html", "training.csv"} <= {p.name for p in files}
    for canary in (IN_ENVIRONMENT, IN_DIFF):
        assert canary not in done.stdout + done.stderr + shown.stdout + shown.stderr
        for path in files:
            assert canary.encode() not in path.read_bytes(), path
    # The planted lines were really in reach: they are there, with their secrets blanked.
    patch = (run_root / "git_diff.patch").read_text()
    assert f"+DB_PASSWORD={REDACTED}" in patch
    assert f"+service_api_key: {REDACTED}" in patch
    assert f"+the value {REDACTED} of a variable" in patch
    record = json.loads((run_root / "run.json").read_text())
    assert str(run_root) == str(run_root.resolve()) and record["phases"]


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
    # `timeout` hands on the signals that it gets.
    limit = "timeout --foreground --preserve-status 54000"
    assert f'run: exec {limit} "$RUNNER_TEMP/venv/bin/runbook" nightly ' in text
