"""The whole collection on the real machine, the canary, and what is asked of the host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from runbook.config.settings import environment_notes, environment_problems
from runbook.folder.facts import finish
from runbook.machine import host
from runbook.machine.host import Seen, ask_torch, find_trainers
from runbook.machine.preflight import collect_preflight, load_drafts
from runbook.process import run_tool
from runbook.records.evidence import Fact
from tests.factory.tables import rows, table
from tests.shared import crowded

CANARY = "canary-77aa88bb99cc"


NEEDS = ("the hub does not answer", "checkpoints: 0.01 GiB for 3")


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Fact]]:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", CANARY)
        patch.setenv("NSA_DDP_BUCKET_MB", "50")
        patch.setenv("TORCH_LOGS_URL", f"https://me:{CANARY}@logs.example/")
        notes: list[str] = []
        facts = collect_preflight(folder, expected_branch="nowhere", note=notes.append, needs=NEEDS)
    assert notes
    return folder, facts


def test_what_launches_need_is_a_fact_of_its_own(collected: tuple[Path, dict[str, Fact]]) -> None:
    fact = collected[1]["needs.missing"]
    assert (fact.value, fact.note) == NEEDS


def test_the_artifacts_bear_the_runbooks_names(collected: tuple[Path, dict[str, Fact]]) -> None:
    folder, facts = collected
    names = {path.name for path in folder.iterdir()}
    assert names >= {"git_sha.txt", "git_status.txt", "git_diff.patch", "collect_env.txt"}
    assert ("nvidia_smi.xml" in names) == (facts["gpu.names"].value is not None)
    assert "PyTorch version: " in (folder / "collect_env.txt").read_text()
    if facts["git.sha"].value is not None:
        assert (folder / "git_sha.txt").read_text().strip() == facts["git.sha"].value


def test_a_trainer_that_kills_python_does_not_take_torchs_answers_along(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        answers = ask_torch(trainer="deadly")
    assert answers.version is not None
    assert not answers.trainer_imports
    assert "exit code 7" in answers.trainer_error


def test_a_tool_that_is_absent_fails_or_hangs_is_a_problem_in_words() -> None:
    assert run_tool(["no-such-tool-anywhere"], timeout_s=5).problem.startswith(
        "no-such-tool-anywhere: "
    )
    failed = run_tool(["sh", "-c", "echo first >&2; echo last >&2; exit 3"], timeout_s=5)
    assert failed.problem == "sh: exit code 3: last"
    hung = run_tool(["sh", "-c", "echo partial; sleep 60 & wait"], timeout_s=0.5)
    assert hung.problem == "sh: no answer within 0.5 s"
    assert hung.stdout == "partial\n"


def test_a_tool_that_cannot_be_ended_is_not_waited_for() -> None:
    """A child in a session of its own keeps the pipes open, like a tool that hangs in a driver."""
    began = time.monotonic()
    stuck = run_tool(["sh", "-c", "setsid sleep 20 & wait"], timeout_s=0.5)
    assert stuck.problem == "sh: no answer within 0.5 s, and it does not end"
    assert time.monotonic() - began < crowded(10)


def test_an_interrupt_stays_one_when_the_tool_ends_by_itself_meanwhile() -> None:
    """Python waits a quarter of a second for a child when it is interrupted, and reaps it then."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        for seconds in ("0.3", "30"):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                run_tool(["sleep", seconds], timeout_s=60)
    finally:
        signal.signal(signal.SIGALRM, earlier)


def test_a_tool_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    assert CANARY not in run_tool(["env"], timeout_s=5).stdout


def test_a_fact_without_value_and_reason_is_a_defect(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(RuntimeError, match="no value and no note"):
        finish([Fact(name="a", value=None, path="f")], tmp_path)
    with pytest.raises(RuntimeError, match="two facts"):
        finish([Fact(name="a", value=1, path="f"), Fact(name="a", value=2, path="f")], tmp_path)


def test_where_there_is_no_shared_memory_it_is_said(tmp_path: Path) -> None:
    facts = {one.name: one for one in load_drafts(tmp_path)}
    for name in ("host.shm_gib", "host.shm_free_gib"):
        assert facts[name].value is None and "No such file" in facts[name].note


def test_infiniband_ports_with_their_state(tmp_path: Path) -> None:
    ports = rows(__file__, "infiniband")
    for told in ports:
        port = tmp_path / told["port"].replace("/", "/ports/")
        port.mkdir(parents=True)
        (port / "state").write_text(f"{told['state']}\n")
        (port / "link_layer").write_text(f"{told['layer']}\n")
    assert host.find_infiniband(tmp_path) == {told["port"]: told["is"] for told in ports}
    assert host.find_infiniband(tmp_path / "absent") == {}


def test_memory_is_that_of_the_container_if_less(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    whole = host.memory_total_gib(tmp_path)
    assert whole == host.memory_total_gib(tmp_path / "absent") > 0.25
    (tmp_path / "memory.max").write_text(f"{1024**3 // 4}\n")
    assert host.memory_total_gib(tmp_path) == 0.25


def test_write_speed_leaves_nothing_behind(tmp_path: Path) -> None:
    assert host.write_speed_mib_s(tmp_path, size_mib=2) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        host.write_speed_mib_s(tmp_path / "absent", size_mib=1)


def test_a_held_port_is_not_free_and_names_its_owner() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        assert f"pid {os.getpid()}" in (host.port_holder(number) or "")
    assert host.port_holder(number) is None


@table(__file__, "trees")
def test_a_trainer_of_anybody_is_found_by_what_it_runs(
    why: str, tree: list[dict[str, Any]], more: dict[str, str], orphans: dict[int, bool]
) -> None:
    """`ps aux | grep train_showcase` of the documents, without what only has the name."""
    seen = [Seen(**{**one, "words": tuple(one.get("words", "").split())}) for one in tree]
    assert {item.pid: item.orphan for item in find_trainers(seen, **more)} == orphans, why


def test_a_trainer_that_somebody_left_is_named_with_its_pid_and_left_alone() -> None:
    """A real process without a token, whose starter has gone; its own trainer only sleeps."""
    middle = (
        "import subprocess, sys; words = [sys.executable, '-c', 'import time; time.sleep(60)'];"
        "print(subprocess.Popen([*words, '-m', 'nsa.train'], stdout=subprocess.DEVNULL).pid)"
    )
    pid = int(subprocess.check_output([sys.executable, "-c", middle], start_new_session=True))
    try:
        (mine,) = [item for item in find_trainers() if item.pid == pid]
        assert mine.orphan and str(mine).startswith(f"pid {pid} left over: {sys.executable} -c ")
        assert psutil.pid_exists(pid)
    finally:
        os.kill(pid, 9)


def test_everything_wrong_with_the_environment_is_listed() -> None:
    wrong = rows(__file__, "wrong_variables")
    problems = environment_problems(
        {name: value for row in wrong for name, value in row["set"].items()}, uses_nccl=True
    )
    assert len(problems) == len(wrong)
    assert [row for row in wrong if row["said"] not in "\n".join(problems)] == []


def test_variables_that_torch_renamed_get_a_note_each() -> None:
    notes = environment_notes(
        {"NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ALGO": "Ring", "NCCL_LATER": "1"}, uses_nccl=True
    )
    assert len(notes) == 2
    assert notes["NCCL_ASYNC_ERROR_HANDLING"]
    assert notes["NCCL_LATER"].startswith("no name that NCCL 2.")
