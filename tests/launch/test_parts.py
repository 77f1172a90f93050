"""The launcher's parts: environment, command line, budgets, blame, counters, ownership."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from runbook.errors import RunbookError, UsageError
from runbook.files import make_private_dir, write_atomic
from runbook.launch import Budgets
from runbook.launch.classify import classify_trainer, is_communication_failure, rank_exits
from runbook.launch.command import build_command, free_port
from runbook.launch.endings import exit_code_of, oom_kills
from runbook.launch.incident import busy_ranks
from runbook.launch.processes import build_environment, redacted
from runbook.launch.ranks import RankState
from runbook.launch.reaper import carriers, environment_holds, kill_all, signal_owned
from runbook.launch.watchdog import Watchdog, blame
from runbook.read import read_launch
from runbook.records import ArmSchedule, Launch, LaunchStatus
from tests.launch.helpers import fake_launch, run

MACHINE = {
    "PATH": "/bin",
    "HOME": "/root",
    "LD_LIBRARY_PATH": "/cuda",
    "NSA_DDP_BUCKET_MB": "1",
    "NCCL_DEBUG": "INFO",
    "AWS_SECRET_ACCESS_KEY": "x",
    "LD_PRELOAD": "evil.so",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


def environment(plan: dict[str, str]) -> dict[str, str]:
    return build_environment(MACHINE, plan, token="ab", run_dir=Path("/runs/x"), loopback=True)


def test_the_environment_is_an_allow_list() -> None:
    found = environment({"NSA_OPT_FUSED": "1", "NCCL_ALGO": "Ring"})
    assert found == {
        "PATH": "/bin",
        "HOME": "/root",
        "LD_LIBRARY_PATH": "/cuda",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NSA_OPT_FUSED": "1",
        "NCCL_ALGO": "Ring",
        "RUNBOOK_RUN_TOKEN": "ab",
        "RUNBOOK_RUN_DIR": "/runs/x",
    }


def test_a_plan_cannot_change_how_programs_are_found() -> None:
    names = ("LD_PRELOAD", "PYTHONPATH", "PATH", "RUNBOOK_RUN_TOKEN", "BASH_ENV", "NSA_OPT_FUSED")
    with pytest.raises(UsageError) as caught:
        environment(dict.fromkeys(names, "x"))
    assert len(caught.value.problems) == 5
    assert all(name in str(caught.value) for name in names[:5])


def test_secrets_are_not_recorded() -> None:
    found = redacted({"HF_TOKEN": "s3", "NSA_LR": "1", "HF_API_KEY": "s4"})
    assert found == {"HF_TOKEN": "<redacted>", "NSA_LR": "1", "HF_API_KEY": "<redacted>"}


def trainer(*argv: str, **fields: object) -> Launch:
    values: dict[str, object] = {
        "name": "x", "phase": "baseline", "kind": "trainer", "argv": argv, "env": {},
        "run_dir": "x", "nproc": 2, "steps": 300, "timeout_s": 1,
    }  # fmt: skip
    return Launch(**(values | fields))  # type: ignore[arg-type]


def test_torchrun_is_this_python_on_loopback_and_a_free_port(tmp_path: Path) -> None:
    command = build_command(
        trainer("torchrun", "--nproc_per_node=2", "-m", "nsa.train", "--steps", "300"), tmp_path
    )
    assert command.argv[:3] == (sys.executable, "-m", "nsa.loopback")
    assert "--local-addr=127.0.0.1" in command.argv
    assert f"--rdzv-endpoint=127.0.0.1:{command.port}" in command.argv
    assert command.argv[-5:] == ("--nproc_per_node=2", "-m", "nsa.train", "--steps", "300")


def test_a_retry_takes_its_own_steps(tmp_path: Path) -> None:
    launch = trainer("python", "-m", "nsa.train", "--steps", "300", retry_steps=50)
    assert build_command(launch, tmp_path).steps == 300
    again = build_command(launch, tmp_path, retry=True)
    assert (again.steps, again.argv[-2:]) == (50, ("--steps", "50"))


def test_only_python_and_torchrun_are_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="allowed are torchrun and python"):
        build_command(trainer("bash", "-c", "true"), tmp_path)


def test_an_effective_config_is_written_and_named(tmp_path: Path) -> None:
    launch = trainer(
        "python", "-m", "nsa.train", "--config", "configs/cpu_smoke.yaml",
        config_overrides={"train.lr": 1e-4, "runtime.use_flash": False, "train.seed": 7},
    )  # fmt: skip
    argv = build_command(launch, tmp_path).argv
    path = Path(argv[argv.index("--config") + 1])
    assert path == tmp_path / "config.yaml"
    document = yaml.safe_load(path.read_text())
    assert document["train"]["seed"] == 7
    assert document["runtime"]["use_flash"] is False
    assert float(document["train"]["lr"]) == 1e-4
    shipped = Path(__file__).parents[2] / "configs" / "cpu_smoke.yaml"
    assert document["model"] == yaml.safe_load(shipped.read_text())["model"]


def test_a_shipped_config_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = trainer("python", "-m", "nsa.train", env={"CONFIG": "configs/cpu_smoke.yaml"})
    assert Path(build_command(launch, tmp_path).env["CONFIG"]).is_file()
    for name in ("configs/nothing.yaml", "configs/../pyproject.toml", "/etc/nothing"):
        with pytest.raises(RunbookError, match="no trainer config"):
            build_command(trainer("python", "--config", name), tmp_path)


def test_arms_are_handed_over_as_a_file(tmp_path: Path) -> None:
    schedule = ArmSchedule(
        settings={"a": {"NSA_OPT_FUSED": "1"}}, rounds=(("a",),), steps=2, warmup_steps=1
    )
    argv = build_command(trainer("python", schedule=schedule), tmp_path).argv
    assert argv[-2] == "--arms"
    assert json.loads(Path(argv[-1]).read_text())["blocks"][0]["arm"] == "a"


@pytest.mark.parametrize(
    ("body", "code", "status"),
    [
        ("def test_a(): pass", 0, LaunchStatus.COMPLETED),
        ("def test_a(): assert 0", 1, LaunchStatus.COMPLETED),
        ("", 5, LaunchStatus.COMPLETED),
        ("import nothing_of_that_name", 2, LaunchStatus.CRASHED),
        ("import os; os._exit(0)", 0, LaunchStatus.CRASHED),
    ],
    ids=["passes", "fails", "nothing there", "broken", "ends before its report"],
)
def test_pytest_is_completed_if_its_report_can_say_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int, status: LaunchStatus
) -> None:
    # A configuration of the current folder that no pytest could work with must not matter.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.chdir(tmp_path)
    test = tmp_path / "test_one.py"
    test.write_text(body + "\n")
    launch = trainer("python", "-m", "pytest", "-q", str(test), kind="pytest", timeout_s=60)
    result = run(launch, tmp_path)
    assert (result.status, result.exit_code) == (status, code)
    evidence = read_launch(tmp_path, launch, result)
    if status is LaunchStatus.COMPLETED:
        assert evidence.junit is not None
        statuses = [case.status for case in evidence.junit.cases]
        assert statuses == {0: ["passed"], 1: ["failed"], 5: []}[code]


def test_a_port_in_use_is_not_given_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert all(free_port() != listener.getsockname()[1] for _ in range(20))


def test_budgets_depend_on_what_a_rank_does() -> None:
    budgets = Budgets.for_launch(fake_launch(env={"NSA_WATCH_HEARTBEAT_STALL_S": "3"}))
    assert (budgets.of_phase("step"), budgets.of_phase("data")) == (3, 3)
    assert budgets.of_phase("checkpoint") > 60
    assert budgets.of_phase("step", longest_step_s=2.0) == 10
    assert Budgets.for_launch(fake_launch()).step_s == 180


def rank(number: int, *, age: float, phase: str = "step", step: int = 5) -> RankState:
    return RankState(rank=number, path=Path("x"), phase=phase, step=step, changed_at=1000.0 - age)


@pytest.mark.parametrize(
    ("ranks", "states", "culprit"),
    [
        ([rank(0, age=4), rank(1, age=4, step=4)], {}, 1),
        ([rank(0, age=5), rank(1, age=4, phase="data")], {}, 1),
        ([rank(0, age=5), rank(1, age=4)], {0: "S", 1: "T"}, 1),
        ([rank(0, age=4), rank(1, age=5)], {0: "S", 1: "R"}, 1),
        ([rank(0, age=4), rank(1, age=4), rank(2, age=4, phase="checkpoint")], {}, 0),
    ],
    ids=["behind", "earlier in its step", "stopped", "silent longest", "ahead is not to blame"],
)
def test_who_is_to_blame(ranks: list[RankState], states: dict[int, str], culprit: int) -> None:
    assert blame(ranks, states).rank == culprit


def test_among_equals_the_one_in_its_own_code_is_to_blame(tmp_path: Path) -> None:
    """All ranks are in backward; one sleeps in a layer, the others wait for its gradients."""
    frames = {
        0: ["/x/torch/autograd/graph.py", "/x/nsa/train/engine.py", "<frozen runpy>"],
        1: ["/x/nsa/attention/selected.py", "/x/torch/autograd/graph.py", "<frozen runpy>"],
    }
    files = []
    for number, names in frames.items():
        thread = "".join(f'  File "{name}", line 7 in f\n' for name in names[:-1])
        text = (
            'Thread 0x1 (most recent call first):\n  File "/x/nsa/train/process.py", line 1 in w\n'
            '  File "/x/threading.py", line 2 in run\n\n'
            f"Current thread 0x2 (most recent call first):\n{thread}"
            f'  File "{names[-1]}", line 3 in _run_module_as_main\n'
        )
        path = tmp_path / f"stackdump_rank{number}_99.txt"
        path.write_text(text)
        files.append(path)
    assert busy_ranks(files) == {1}
    ranks = [rank(0, age=5), rank(1, age=4)]
    assert blame(ranks, {}, busy_ranks(files)).rank == 1
    assert blame(ranks, {}).rank == 0  # without the stacks: the one that is silent longest
    late = [rank(0, age=4, step=4), rank(1, age=4)]
    assert blame(late, {}, busy_ranks(files)).rank == 0  # being behind says more than a stack


def test_a_hang_is_found_at_its_budget_and_not_before() -> None:
    watchdog = Watchdog(Budgets(step_s=3), wanted=2)
    for age, found in ((2.9, False), (3.1, True)):
        ranks = [rank(0, age=age), rank(1, age=age + 0.1)]
        hang = watchdog.find_hang(ranks, now=1000.0)
        assert (hang is not None) == found
    assert hang is not None and hang.rank == 1


def test_a_missing_rank_is_not_judged_here() -> None:
    assert Watchdog(Budgets(step_s=3), wanted=2).find_hang([rank(0, age=99)], now=1000.0) is None


def test_waiting_for_a_slow_rank_is_excused_also_right_after() -> None:
    watchdog = Watchdog(Budgets(step_s=3, checkpoint_s=60), wanted=2)
    assert (
        watchdog.find_hang([rank(0, age=5, phase="checkpoint"), rank(1, age=5)], now=1000) is None
    )
    # Rank 0 has just gone on; rank 1 has had no chance to.
    assert watchdog.find_hang([rank(0, age=0.0), rank(1, age=5)], now=1000.1) is None
    late = [rank(0, age=0.0), rank(1, age=5)]
    assert watchdog.find_hang(late, now=1003.2) is not None


def test_a_rank_that_is_behind_is_not_excused_by_one_that_is_ahead() -> None:
    watchdog = Watchdog(Budgets(init_s=3, first_step_s=600), wanted=2)
    ranks = [rank(0, age=4, phase="first_step", step=1), rank(1, age=4, phase="init", step=0)]
    hang = watchdog.find_hang(ranks, now=1000.0)
    assert hang is not None and hang.rank == 1


def test_a_hung_checkpoint_is_found_too() -> None:
    watchdog = Watchdog(Budgets(step_s=3, checkpoint_s=10), wanted=2)
    ranks = [rank(0, age=11, phase="checkpoint"), rank(1, age=12)]
    assert watchdog.find_hang(ranks, now=1000.0) is not None


@pytest.mark.parametrize(
    ("files", "membership", "count"),
    [
        ({"memory.events": "low 0\noom 2\noom_kill 3\n"}, "0::/\n", 3),
        ({"a/b/memory.events": "oom_kill 4\n", "memory.events": "oom_kill 9\n"}, "0::/a/b\n", 4),
        ({"memory/j/memory.oom_control": "under_oom 0\noom_kill 5\n"}, "4:memory:/j\n0::/\n", 5),
        ({"memory/memory.oom_control": "oom_kill 1\n"}, "4:memory:/elsewhere\n", 1),
        ({"memory.events": "nonsense"}, "0::/\n", None),
        ({}, "0::/\n", None),
    ],
)
def test_the_kernels_count_of_memory_kills(
    tmp_path: Path, files: dict[str, str], membership: str, count: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(membership)
    assert oom_kills(tmp_path, tmp_path / "self") == count


@pytest.mark.parametrize(
    ("oom", "status", "sign"),
    [
        ((1, 2), LaunchStatus.OUT_OF_MEMORY, "oom_kill 1 -> 2"),
        ((1, 1), LaunchStatus.CRASHED, "cause unknown (not for memory)"),
        ((None, None), LaunchStatus.CRASHED, "counter is unreadable"),
    ],
)
def test_sigkill_is_told_apart_from_memory(
    oom: tuple[int | None, int | None], status: LaunchStatus, sign: str
) -> None:
    console = ["x failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: python"]
    ranks = [rank(0, age=0), rank(1, age=0)]
    ranks[1].died_at = 999.0
    exits = rank_exits(ranks, 1, console)
    end = classify_trainer(ranks, exits, child_code=1, wanted=2, oom=oom, console=console)
    assert (end.status, end.culprit_rank) == (status, 1)
    assert sign in end.cause


def test_a_peer_that_lost_its_connection_is_not_to_blame() -> None:
    console = ["x failed (exitcode: -11) local_rank: 1 (pid: 12) of binary: python"]
    ranks = [rank(0, age=9), rank(1, age=0)]
    ranks[0].exit_code, ranks[0].exit_reason = 1, "RuntimeError: NCCL error: peer is gone"
    ranks[1].died_at = 999.9
    end = classify_trainer(
        ranks, rank_exits(ranks, 1, console), child_code=1, wanted=2, oom=(0, 0), console=console
    )
    assert (end.culprit_rank, "SIGSEGV" in end.cause) == (1, True)
    assert not is_communication_failure(end, [*console, "NCCL error"])


@pytest.fixture
def bystander() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sleep", "30"], env={"RUNBOOK_RUN_TOKEN": "other", "PATH": "/bin:/usr/bin"}
    )


def test_a_signal_reaches_only_who_carries_the_token(bystander: subprocess.Popen[bytes]) -> None:
    while not environment_holds(bystander.pid, "other"):
        time.sleep(0.01)
    assert not signal_owned(bystander.pid, "mine", signal.SIGKILL)
    assert kill_all("mine") == []
    assert bystander.poll() is None
    assert carriers("other") == [bystander.pid]
    assert not environment_holds(bystander.pid, "othe")
    assert signal_owned(bystander.pid, "other", signal.SIGKILL)
    assert bystander.wait() == -9
    assert not signal_owned(bystander.pid, "other", signal.SIGKILL)


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(OSError):
        write_atomic(tmp_path / "missing" / "x", "text")


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        make_private_dir(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700] * 2
    with pytest.raises(FileExistsError):
        make_private_dir(tmp_path / "a" / "b")


@pytest.mark.parametrize(("act", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
@pytest.mark.parametrize("waited_for", [False, True])
def test_how_a_process_ended_is_known_without_being_its_parent(
    act: str, code: int, waited_for: bool
) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import os; {act}"])
    handle = os.pidfd_open(child.pid)
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        assert poller.poll(10_000)
        if waited_for:
            child.wait()
        found = exit_code_of(child.pid, handle)
    finally:
        os.close(handle)
        child.wait()
    # Once its parent has waited for it, only kernels since 6.15 remember.
    assert found == code or (waited_for and found is None)


def test_a_rank_that_is_killed_after_its_good_last_word_is_named() -> None:
    ranks = [
        RankState(rank=rank, path=Path("x"), exit_code=0, steps_done=15, died_at=1.0)
        for rank in (0, 1)
    ]
    ranks[1].parent_saw = -9
    exits = rank_exits(ranks, 1, [])
    assert [(e.code, e.signal) for e in exits] == [(0, None), (-9, "SIGKILL")]
    end = classify_trainer(ranks, exits, child_code=1, wanted=2, oom=(0, 0), console=[])
    assert (end.status, end.culprit_rank) == (LaunchStatus.CRASHED, 1)


def test_the_word_of_a_rank_without_an_exit_event_is_its_own() -> None:
    ranks = [RankState(rank=rank, path=Path("x"), died_at=1.0 + rank) for rank in (0, 1)]
    ranks[0].parent_saw = 7
    console = ["[rank0]: OSError: mine", "[rank1]: RuntimeError: Connection closed by peer"]
    end = classify_trainer(
        ranks, rank_exits(ranks, 1, console), child_code=1, wanted=2, oom=(0, 0), console=console
    )
    assert end.cause == "rank 0 ended: exit code 7: [rank0]: OSError: mine"
