"""A config or a machine that cannot run the trainer is told in its own words, and is no crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.folder.launch.heartbeats import Exit
from runbook.launch.end import End, classify_trainer, is_communication_failure, rank_exits
from runbook.launch.watch.ranks import RankState
from runbook.records import LaunchStatus
from tests.launch.helpers import fake_launch, rank, run

LIBUV = "The libuv TCPStore backend does not support initialization with an listen fd"


def classified(ranks: list[RankState], console: list[str], code: int | None = 1) -> End:
    exits = rank_exits(ranks, code, console)
    return classify_trainer(ranks, exits, child_code=code, wanted=2, oom=(0, 0), console=console)


def ended(number: int, code: int, reason: str = "", *, step: int = 0) -> RankState:
    state = rank(number, age=5.0 - number, step=step)
    state.exit = Exit(code=code, reason=reason, steps_done=step)
    return state


def test_the_refusal_of_a_rank_is_the_cause_word_by_word() -> None:
    end = classified([ended(0, 2, "cannot start:\n  - no CUDA device 0"), ended(1, 13)], [])
    assert end.status is LaunchStatus.CONFIG_ERROR
    assert (end.cause, end.culprit_rank) == ("cannot start: - no CUDA device 0", 0)


@pytest.mark.parametrize("other", [1, -11, 12])
def test_a_refusal_outranks_whatever_became_of_the_peers(other: int) -> None:
    """The peer's own end came first by the clock; no peer can make a rank refuse its config."""
    first = ended(0, other, "RuntimeError: connection closed by peer")
    second = ended(1, 2, "no CUDA device 1")
    end = classified([first, second], [])
    assert (end.status, end.cause) == (LaunchStatus.CONFIG_ERROR, "no CUDA device 1")


def test_a_refusal_before_the_first_heartbeat_is_read_from_the_console() -> None:
    console = [
        "[rank 1] this launch cannot start: 2 problem(s)",
        "  - train.seq_lenn: no such key",
        "  - train.lr: expected a number",
        "E1121 12:00:00 torch/distributed/elastic/x.py:1] failed (exitcode: 2) local_rank: 1 "
        "(pid: 7) of binary: python",
    ]
    end = classified([], console)
    assert end.status is LaunchStatus.CONFIG_ERROR
    assert end.cause == (
        "this launch cannot start: 2 problem(s) - train.seq_lenn: no such key "
        "- train.lr: expected a number"
    )


def test_a_trainer_that_refuses_without_an_error_line_is_quoted_too() -> None:
    console = [
        "loading",
        "please give me a dataset",
        "x failed (exitcode: 2) local_rank: 0 (pid: 1)",
    ]
    assert classified([], console).cause == "please give me a dataset"


MACHINE = [
    f"RuntimeError: {LIBUV}",
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: refused",
    "RuntimeError: No CUDA GPUs are available",
    "AssertionError: Torch not compiled with CUDA enabled",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "ModuleNotFoundError: No module named 'torch'",
]


@pytest.mark.parametrize("line", MACHINE)
def test_a_machine_that_refuses_is_an_environment_error(line: str) -> None:
    """Said by torchrun itself, or by a rank before its first step."""
    for end in (
        classified([], ["Traceback (most recent call last):", line]),
        classified([ended(0, 1, line), ended(1, 13)], []),
    ):
        assert (end.status, end.cause) == (LaunchStatus.ENVIRONMENT_ERROR, line)
        assert not is_communication_failure(end, [line])


def test_a_port_that_is_taken_is_tried_again() -> None:
    line = "torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE"
    end = classified([], [line])
    assert end.status is LaunchStatus.ENVIRONMENT_ERROR
    assert is_communication_failure(end, [line])


def test_a_real_torchrun_whose_store_refuses_is_invalid_and_started_once(tmp_path: Path) -> None:
    code = f"import sys; sys.stderr.write('RuntimeError: {LIBUV}\\n'); sys.exit(1)"
    launch = fake_launch().model_copy(update={"argv": ("python", "-c", code)})
    result = run(launch, tmp_path, retry=True)
    assert (result.status, result.attempts) == (LaunchStatus.ENVIRONMENT_ERROR, 1)
    assert result.cause == f"RuntimeError: {LIBUV}"
