"""The whole collection on the real machine, and the canary."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from runbook.folder.facts import finish
from runbook.machine.host import ask_torch
from runbook.machine.preflight import collect_preflight, load_drafts
from runbook.process import run_tool
from runbook.records.evidence import Fact
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
