"""What an end means, and whose it is: from exit heartbeats, the kernel and the console."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nsa.contract import PARTED
from runbook.folder.launch.lines import Exit
from runbook.launch.end import classify_trainer, is_communication_failure, rank_exits
from runbook.launch.watch.rank_state import RankState
from runbook.records import End, Kind, LaunchStatus
from tests.launch.helpers import rank

CONFIG, ENVIRONMENT = LaunchStatus.CONFIG_ERROR, LaunchStatus.ENVIRONMENT_ERROR
CRASHED, OUT_OF_MEMORY = LaunchStatus.CRASHED, LaunchStatus.OUT_OF_MEMORY
LIBUV = "The libuv TCPStore backend does not support initialization with an listen fd"
TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE"


def state(
    number: int,
    code: int | None = None,
    reason: str = "",
    *,
    step: int = 0,
    age: float | None = None,
    died_at: float | None = None,
    saw: int | None = None,
) -> RankState:
    """A rank; with a code it has said its exit. `saw`: what its parent saw of its end."""
    found = rank(number, age=5.0 - number if age is None else age, step=step)
    found.exit = None if code is None else Exit(code=code, reason=reason, steps_done=step)
    found.died_at, found.parent_saw = died_at, saw
    return found


def failed(code: int, place: int) -> str:
    """What torchrun says of a child."""
    return f"x failed (exitcode: {code}) local_rank: {place} (pid: 12) of binary: python"


@dataclass(frozen=True, kw_only=True)
class Case:
    """An end as it looks, and what it is; `again`: it is tried once more."""

    ranks: tuple[RankState, ...] = ()
    console: tuple[str, ...] = ()
    oom: tuple[int | None, int | None] = (0, 0)
    status: LaunchStatus = CRASHED
    culprit: int | None = None
    cause: str
    whole: bool = False
    again: bool = False

    def end(self) -> End:
        exits = rank_exits(self.ranks, 1, self.console)
        return classify_trainer(
            self.ranks, exits, child_code=1, wanted=2, oom=self.oom, console=self.console
        )


def killed(oom: tuple[int | None, int | None], status: LaunchStatus, cause: str) -> Case:
    ranks = (state(0, age=0), state(1, age=0, died_at=999.0))
    return Case(
        ranks=ranks, console=(failed(-9, 1),), oom=oom, status=status, culprit=1, cause=cause
    )


def refused(other: int) -> Case:
    """The peer's own end came first by the clock; no peer can make a rank refuse its config."""
    peer = state(0, other, "RuntimeError: connection closed by peer")
    ranks = (peer, state(1, 2, "no CUDA device 1"))
    return Case(ranks=ranks, status=CONFIG, culprit=1, cause="no CUDA device 1", whole=True)


CASES = {
    "killed for memory": killed((1, 2), OUT_OF_MEMORY, "oom_kill 1 -> 2"),
    "killed by somebody": killed((1, 1), CRASHED, "cause unknown (not for memory)"),
    "killed, nobody counts": killed((None, None), CRASHED, "counter is unreadable"),
    "a peer that lost its connection is not to blame": Case(
        ranks=(
            state(0, 1, "RuntimeError: NCCL error: peer is gone", age=9),
            state(1, age=0, died_at=999.9),
        ),
        console=(failed(-11, 1), "NCCL error"),
        culprit=1,
        cause="SIGSEGV",
    ),
    "killed after its good exit": Case(
        ranks=(state(0, 0, died_at=1.0), state(1, 0, died_at=1.0, saw=-9)),
        culprit=1,
        cause="SIGKILL",
    ),
    "the error line of a rank without an exit event is its own": Case(
        ranks=(state(0, died_at=1.0, saw=7), state(1, died_at=2.0)),
        console=("[rank0]: OSError: mine", "[rank1]: RuntimeError: Connection closed by peer"),
        culprit=0,
        cause="rank 0 ended: exit code 7: [rank0]: OSError: mine",
        whole=True,
    ),
    "the refusal of a rank, word by word": Case(
        ranks=(state(0, 2, "cannot start:\n  - no CUDA device 0"), state(1, 13)),
        status=CONFIG,
        culprit=0,
        cause="cannot start: - no CUDA device 0",
        whole=True,
    ),
    **{f"a refusal outranks {other}": refused(other) for other in (1, -11, 12)},
    "a port that is taken": Case(console=(TAKEN,), status=ENVIRONMENT, cause=TAKEN, again=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_end(case: Case) -> None:
    end = case.end()
    assert (end.status, end.culprit_rank) == (case.status, case.culprit)
    assert end.cause == case.cause if case.whole else case.cause in end.cause
    assert is_communication_failure(end, case.console) is case.again


@pytest.mark.parametrize(
    ("console", "cause"),
    [
        (
            (
                "[rank 1] this launch cannot start: 2 problem(s)",
                "  - train.seq_lenn: no such key",
                "  - train.lr: expected a number",
                f"E1121 12:00:00 torch/distributed/elastic/x.py:1] {failed(2, 1)}",
            ),
            "this launch cannot start: 2 problem(s) - train.seq_lenn: no such key "
            "- train.lr: expected a number",
        ),
        (("loading", "please give me a dataset", failed(2, 0)), "please give me a dataset"),
    ],
)
def test_a_refusal_before_the_first_heartbeat_is_read_from_the_console(
    console: tuple[str, ...], cause: str
) -> None:
    exits = rank_exits([], 1, console)
    end = classify_trainer([], exits, child_code=1, wanted=2, oom=(0, 0), console=console)
    assert (end.status, end.cause) == (CONFIG, cause)


@pytest.mark.parametrize(
    "line",
    [
        f"RuntimeError: {LIBUV}",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: refused",
        "RuntimeError: No CUDA GPUs are available",
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "ModuleNotFoundError: No module named 'torch'",
    ],
)
def test_a_machine_that_refuses_is_an_environment_error(line: str) -> None:
    """Said by torchrun itself, or by a rank before its first step."""
    by_torchrun = Case(console=("Traceback (most recent call last):", line), cause=line)
    by_rank = Case(ranks=(state(0, 1, line), state(1, 13)), cause=line)
    for end in (by_torchrun.end(), by_rank.end()):
        assert (end.status, end.cause) == (ENVIRONMENT, line)
        assert not is_communication_failure(end, [line])


TIMED_OUT = (
    "[rank0]:[E626 06:24:44.903 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
    "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)
THEN = (
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated "
    "with exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808)",
)
STUCK = "[rank0]:[F ProcessGroupNCCL.cpp:1200] ProcessGroupNCCL's watchdog got stuck for 480 s"
ILLEGAL = (
    "[rank0]: [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: CUDA "
    "error: an illegal memory access was encountered"
)


@pytest.mark.parametrize(
    ("lines", "watchdog", "again"),
    [
        ((TIMED_OUT, *THEN), True, True),
        (THEN, True, True),
        ((STUCK,), True, True),
        ((ILLEGAL,), True, False),
        (("terminate called after throwing an instance of 'c10::Error'",), False, False),
        ((TIMED_OUT.replace("ank0", "ank1").replace("Rank 0", "Rank 1"),), False, False),
    ],
)
def test_an_abort_is_a_failure_of_communication_where_nccls_watchdog_says_so(
    lines: tuple[str, ...], watchdog: bool, again: bool
) -> None:
    """Rank 0 of two was ended by SIGABRT; torchrun says so after these lines."""
    ranks = (state(0, age=0, died_at=999.0), state(1, age=0))
    end = Case(ranks=ranks, console=(*lines, failed(-6, 0)), cause="SIGABRT").end()
    assert (end.status, end.culprit_rank, "SIGABRT" in end.cause) == (CRASHED, 0, True)
    assert ("by NCCL's watchdog: " in end.cause, "\n" in end.cause) == (watchdog, False)
    assert ("CUDA error: an illegal" in end.cause) == (ILLEGAL in lines)
    assert is_communication_failure(end, lines) is again


def test_ranks_that_parted_have_a_kind_and_no_culprit() -> None:
    said = f"{PARTED} (seen first in step 2: the weights of 1 of 16 parameters, first a.b): DDP did"
    both = (state(0, 1, said, step=4), state(1, 1, said, step=4))
    end = Case(ranks=both, cause=said).end()
    assert (end.status, end.kind, end.culprit_rank, end.cause) == (CRASHED, Kind.PARTED, None, said)
