"""The rehearsed trainer: writes the folder of a launch instead of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rehearsal.machine import Ending, Machine
from benchmarks.rehearsal.trainer import rundir
from benchmarks.rehearsal.trainer.beats import GROUP_TIMEOUT_S, STARTED_S, Rank
from benchmarks.rehearsal.trainer.devices import write_ceilings, write_samples
from benchmarks.rehearsal.trainer.job import Job, ranks_of
from benchmarks.rehearsal.trainer.steps import seed_of, simulate
from nsa.contract import (
    ENV_JSON,
    RUN_TOKEN_VARIABLE,
    SDPA_AUDIT_JSON,
    STACKDUMPS,
    Event,
    ExitCode,
    Phase,
)
from runbook.records import Launch
from tests.factory.files import write_beats

# 2026-01-01 06:00 UTC: when the first launch of a rehearsed run begins.
BEGAN = 1_767_247_200.0
# Its monotonic clock then, and what to add to it for the wall's.
_UP_S = 86_400.0
_WALL_S = BEGAN - _UP_S


@dataclass(frozen=True, kw_only=True)
class Order:
    """One attempt of a launch: what would have been executed, and where."""

    launch: Launch
    argv: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended, after how many seconds, and what it printed."""

    code: int
    duration_s: float
    console: Sequence[str]


@dataclass(kw_only=True)
class _End:
    """How a launch ends: after which step, and `after_s` later with which code of the command.

    begun: another step was begun. exits: each rank's code and reason; without them nobody could
    say anything. last: what each rank says before that. first: the rank that torchrun names, with
    its code.
    """

    stop: int
    after_s: float
    code: int = 1
    begun: bool = False
    exits: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    last: tuple[Event, Mapping[str, str]] | None = None
    says: Sequence[str] = ()
    first: tuple[int, int] | None = None


class Trainer:
    """Runs launches on one machine, one after the other; its clock goes on between them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock_s = _UP_S
        self.gone = False

    @property
    def wall_s(self) -> float:
        """Seconds since 1970, now, on the machine."""
        return self.clock_s + _WALL_S

    def run(self, order: Order, enough: Callable[[], bool] | None = None) -> Ended:
        """Write everything that this launch leaves; `enough` is asked after each round of arms."""
        began, self.clock_s = self.clock_s, self.clock_s + 5.0
        if "pytest" in order.argv:
            ended = self._pytest(order)
        elif "nsa.ceilings" in order.argv:
            ranks, token = ranks_of(order.argv), order.env[RUN_TOKEN_VARIABLE]
            write_ceilings(order.folder, self.machine, ranks, token)
            ended = Ended(code=0, duration_s=19.0, console=["[ceilings] measured"])
        elif self.gone:
            ended = Ended(code=1, duration_s=9.0, console=[
                "RuntimeError: No CUDA GPUs are available", _torchrun_says(0, 1, 4_299_999),
            ])  # fmt: skip
        else:
            ended = self._train(order, began, enough)
        self.clock_s = began + ended.duration_s + 5.0
        return ended

    def _pytest(self, order: Order) -> Ended:
        (order.folder / "junit.xml").write_bytes(rundir.junit(self.machine, order.launch))
        failed = bool(self.machine.failing_tests)
        return Ended(code=int(failed), duration_s=21.0, console=["tests ran on cuda"])

    def _train(self, order: Order, began: float, enough: Callable[[], bool] | None) -> Ended:
        job = Job(order.argv, order.env, order.launch.run_dir)
        seed = seed_of(self.machine.name, order.attempt)
        steps = simulate(self.machine, job, seed)
        ranks = [
            Rank(machine=self.machine, job=job, steps=steps, rank=rank,
                 began_s=began + STARTED_S, wall_s=_WALL_S)
            for rank in range(job.ranks)
        ]  # fmt: skip
        env = rundir.env_document(self.machine, job, order.launch, order.argv)
        (order.folder / ENV_JSON).write_text(json.dumps(env, indent=1), encoding="utf-8")
        for rank in ranks:
            (order.folder / STACKDUMPS.name(rank.rank, rank.pid)).touch()
        ending = self.machine.ending
        if ending is None or not ending.meets(order.launch.run_dir, order.attempt):
            end = self._good(order, ranks[0], enough)
        else:
            end = self._bad(ranks, ending)
        return self._left(order, ranks, end)

    def _left(self, order: Order, ranks: Sequence[Rank], end: _End) -> Ended:
        """Write what there is of a launch that ended so."""
        job, steps, stop = ranks[0].job, ranks[0].steps, end.stop
        over = float(steps.device_end_s[stop - 1]) if stop else 0.0
        if stop:
            rundir.write_tables(order.folder, ranks[0], stop)
        for rank in ranks:
            records = list(rank.lines(stop, failed=stop + 1 if end.begun else None))
            if end.last is not None:
                event, told = end.last
                records.append(rank.record(event, over + 4e-3, step=stop, phase=Phase.STEP, **told))
            if end.exits:
                code, reason = end.exits[rank.rank]
                # Who crashes for another one's sake does so later.
                late = 0.1 * (code == ExitCode.CRASH) + 0.01 * rank.rank
                records.append(rank.end(over + 0.4 + late, code, reason, stop))
            write_beats(order.folder, rank.rank, records)
        if self.machine.sampled:
            write_samples(order.folder / "gpu_samples.csv", ranks[0], stop, self.machine)
        lines = [*rundir.console(job, steps, stop), *end.says]
        if end.first is not None:
            number, code = end.first
            lines.append(_torchrun_says(number, code, ranks[number].pid))
        return Ended(code=end.code, duration_s=STARTED_S + over + end.after_s, console=lines)

    def _good(self, order: Order, first: Rank, enough: Callable[[], bool] | None) -> _End:
        job = first.job
        stop, stopped = self._until_enough(order, first, enough)
        if any(block.toggles.flag("NSA_SDPA_AUDIT") for block in job.blocks):
            audit = rundir.audit_document(self.machine, job)
            (order.folder / SDPA_AUDIT_JSON).write_text(json.dumps(audit), encoding="utf-8")
        if job.plan.flags.profile_steps:
            rundir.write_profile(order.folder, self.machine, job, first.steps)
        code, reason = ExitCode.SUCCESS, "enough" if stopped else "all steps done"
        if (self.machine.diverges or self.machine.gradient == "own") and job.ranks > 1:
            code = ExitCode.CRASH
            reason = "the parameters differ between the ranks: DDP did not keep them equal"
        return _End(
            stop=stop,
            after_s=2.1,
            code=int(bool(code)),
            exits=dict.fromkeys(range(job.ranks), (code, reason)),
            last=(Event.ENOUGH, {}) if stopped else None,
            first=(0, code) if code else None,
        )

    def _until_enough(
        self, order: Order, first: Rank, enough: Callable[[], bool] | None
    ) -> tuple[int, bool]:
        """After every second round the tables are written, and the harness is asked.

        It looks twice a second, so whether it has looked after a certain round is chance.
        """
        block, blocks = first.steps.block, first.job.blocks
        if enough is None or blocks[0].arm == "":
            return len(block), False
        for number in range(2, blocks[-1].index + 1, 2):
            stop = sum(1 for place in block if blocks[place].index < number)
            rundir.write_tables(order.folder, first, stop)
            if enough():
                return stop, True
        return len(block), False

    def _bad(self, ranks: Sequence[Rank], ending: Ending) -> _End:
        steps, job, culprit = ranks[0].steps, ranks[0].job, ending.rank
        stop = min(ending.step, len(steps.dt_s)) - 1
        if ending.kind == "nan":
            steps.loss[stop] = float("nan")
            why = f"non-finite at step {stop + 1}: loss nan, gradient norm nan"
            exits = dict.fromkeys(range(job.ranks), (int(ExitCode.NONFINITE), why))
            return _End(stop=stop + 1, after_s=2.0, exits=exits, first=(0, ExitCode.NONFINITE),
                        last=(Event.NONFINITE, {"value": "nan"}))  # fmt: skip
        if ending.kind == "oom":
            why = f"out of memory: CUDA out of memory. Tried to allocate {ending.says} on GPU 0"
            exits = dict.fromkeys(
                range(job.ranks), (int(ExitCode.CRASH), "another rank ended: connection closed")
            )
            exits[culprit] = ExitCode.OUT_OF_MEMORY, why
            return _End(stop=stop, after_s=2.0, begun=True, exits=exits,
                        first=(culprit, ExitCode.OUT_OF_MEMORY))  # fmt: skip
        says, after_s = _watchdog_error(culprit, ending.says), 6.0
        self.gone = ending.kind == "lost"
        if ending.kind == "timeout":
            culprit = 1 - culprit  # whoever waits for it is who is aborted
            says, after_s = _watchdog_timeout(culprit), GROUP_TIMEOUT_S + 6.0
        code = 1 if job.plan.ddp else -6
        return _End(stop=stop, after_s=after_s, code=code, begun=True, says=says,
                    first=(culprit, -6))  # fmt: skip


def _torchrun_says(rank: int, code: int, pid: int) -> str:
    """torchrun's own line about the child that failed first."""
    return (
        "E0101 06:00:00.000000 4 torch/distributed/elastic/multiprocessing/api.py:1002] "
        f"failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of binary: python"
    )


def _watchdog_timeout(rank: int) -> list[str]:
    """ProcessGroupNCCL's words when a collective is not over in time."""
    head = f"[rank{rank}]:[E101 06:20:00.0 ProcessGroupNCCL.cpp:683] "
    work = "WorkNCCL(SeqNum=287, OpType=ALLREDUCE, NumelIn=13107200, NumelOut=13107200, "
    return [
        f"{head}[Rank {rank}] Watchdog caught collective operation timeout: {work}"
        "Timeout(ms)=900000) ran for 900012 milliseconds before timing out.",
        f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank}] To avoid data inconsistency, we "
        "are taking the entire process down.",
    ]


def _watchdog_error(rank: int, says: str) -> list[str]:
    """ProcessGroupNCCL's words when its watchdog thread meets a CUDA error."""
    head = f"[rank{rank}]:[E101 06:20:00.0 ProcessGroupNCCL.cpp:2057] "
    return [
        f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread "
        f"terminated with exception: CUDA error: {says}",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
    ]
