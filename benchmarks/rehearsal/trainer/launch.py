"""The rehearsed trainer: writes the folder of a launch instead of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rehearsal.machine import Ending, Machine
from benchmarks.rehearsal.trainer import flights, rundir
from benchmarks.rehearsal.trainer.beats import STARTED_S, Rank
from benchmarks.rehearsal.trainer.ceilings import write_ceilings
from benchmarks.rehearsal.trainer.job import read_job
from benchmarks.rehearsal.trainer.samples import write_samples
from benchmarks.rehearsal.trainer.steps import Job, Steps, seed_of, simulate
from benchmarks.rehearsal.trainer.trace import write_profile
from nsa.contract import (
    ENV_JSON,
    HEARTBEATS,
    SDPA_AUDIT_JSON,
    STACKDUMPS,
    Event,
    ExitCode,
    Phase,
)  # fmt: skip
from runbook.records import Launch

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
    where: str
    token: str
    attempt: int
    samples: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended, after how many seconds, and what it printed."""

    code: int
    duration_s: float
    console: Sequence[str]


class Trainer:
    """Runs launches on one machine, one after the other; its clock goes on between them."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        self.machine, self.seed = machine, seed
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
            ended = self._ceilings(order)
        else:
            ended = self._train(order, began, enough)
        self.clock_s = began + ended.duration_s + 5.0
        return ended

    def _pytest(self, order: Order) -> Ended:
        target = order.argv[list(order.argv).index("--junitxml") + 1]
        Path(target).write_text(rundir.junit(self.machine, order.argv), encoding="utf-8")
        failed = bool(self.machine.failing_tests)
        return Ended(code=int(failed), duration_s=21.0, console=["tests ran on cuda"])

    def _ceilings(self, order: Order) -> Ended:
        ranks = next((int(w.partition("=")[2]) for w in order.argv if "nproc" in w), 1)
        took = write_ceilings(order.folder, self.machine, ranks, order.token)
        return Ended(code=0, duration_s=took, console=["[ceilings] measured"])

    def _train(self, order: Order, began: float, enough: Callable[[], bool] | None) -> Ended:
        job, config = read_job(order.argv, order.env, order.where)
        if self.gone:
            return self._refused(job)
        seed = seed_of(self.machine.name, self.seed, order.attempt)
        steps = simulate(self.machine, job, seed)
        ranks = [
            Rank(machine=self.machine, job=job, steps=steps, rank=rank, token=order.token,
                 began_s=began + STARTED_S, wall_s=_WALL_S)
            for rank in range(job.ranks)
        ]  # fmt: skip
        env = rundir.env_document(self.machine, job, config, order.launch, order.argv)
        env["run_token"] = order.token
        (order.folder / ENV_JSON).write_text(json.dumps(env, indent=1), encoding="utf-8")
        for rank in ranks:
            (order.folder / STACKDUMPS.name(rank.rank, rank.pid)).touch()
        ending = self._ending(order)
        if ending is not None:
            return self._bad_end(order, ranks, ending)
        return self._good_end(order, ranks, enough)

    # -- launches that go to their end -------------------------------------------------------------

    def _good_end(
        self, order: Order, ranks: Sequence[Rank], enough: Callable[[], bool] | None
    ) -> Ended:
        first = ranks[0]
        job, steps = first.job, first.steps
        stop, stopped = self._until_enough(order, first, enough)
        rundir.write_tables(order.folder, first, stop)
        over = float(steps.device_end_s[stop - 1])
        for rank in ranks:
            records = list(rank.lines(stop))
            code, reason = self._said(job, stopped)
            if stopped:
                records.append(rank.record(Event.ENOUGH, over + 0.004, step=stop, phase=Phase.STEP))
            records.append(rank.end(over + 0.9 + 0.01 * rank.rank, code, reason, stop))
            self._write_beats(order, rank, records)
            if job.ranks > 1:
                flights.write_own_record(order.folder, rank, stop, "end")
        if any("NSA_SDPA_AUDIT" in block.settings for block in job.blocks):
            audit = rundir.audit_document(self.machine, job)
            (order.folder / SDPA_AUDIT_JSON).write_text(json.dumps(audit), encoding="utf-8")
        if job.profiled:
            write_profile(order.folder, self.machine, job, steps)
        self._samples(order, first, stop)
        code, reason = self._said(job, stopped)
        lines = rundir.console(job, steps, stop)
        if code:
            lines += _torchrun_says([(rank.rank, code, rank.pid) for rank in ranks])
        return Ended(code=int(bool(code)), duration_s=STARTED_S + over + 2.1, console=lines)

    def _said(self, job: Job, stopped: bool) -> tuple[int, str]:
        if (self.machine.diverges or self.machine.gradient == "own") and job.ranks > 1:
            why = "the parameters differ between the ranks: DDP did not keep them equal"
            return ExitCode.CRASH, why
        return ExitCode.SUCCESS, "enough" if stopped else "all steps done"

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

    def _write_beats(self, order: Order, rank: Rank, records: Sequence[object]) -> None:
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (order.folder / HEARTBEATS.name(rank.rank)).write_text(text, encoding="utf-8")

    def _samples(self, order: Order, first: Rank, stop: int) -> None:
        if self.machine.sampled:
            path = order.folder / "gpu_samples.csv"
            write_samples(path, order.samples, first, stop, self.machine)

    # -- launches that do not ----------------------------------------------------------------------

    def _ending(self, order: Order) -> Ending | None:
        ending = self.machine.ending
        if ending is None or order.attempt > ending.attempts:
            return None
        return ending if ending.at in (order.where, order.where.partition("/")[0]) else None

    def _bad_end(self, order: Order, ranks: Sequence[Rank], ending: Ending) -> Ended:
        first = ranks[0]
        steps: Steps = first.steps
        stop = min(ending.step, len(steps.dt_s)) - 1
        if ending.kind == "nan":
            return self._not_finite(order, ranks, stop + 1)
        if stop:
            rundir.write_tables(order.folder, first, stop)
        over = float(steps.device_end_s[stop - 1]) if stop else 0.0
        lines = rundir.console(first.job, steps, stop)
        if ending.kind == "oom":
            return self._out_of_memory(order, ranks, ending, (stop, over), lines)
        for rank in ranks:
            self._write_beats(order, rank, list(rank.lines(stop, failed=stop + 1)))
            late = ending.kind == "timeout" and rank.rank == ending.rank
            flights.write_nccl_dump(
                order.folder, rank, stop + 1, behind=late, hung=ending.kind == "timeout"
            )
        culprit = ranks[ending.rank]
        if ending.kind == "timeout":
            culprit = ranks[1 - ending.rank] if len(ranks) > 1 else culprit
            lines += _watchdog_timeout(culprit)
            over += 900.0
        else:
            lines += _watchdog_error(culprit, ending.says)
            self.gone = ending.kind == "lost"
        self._samples(order, first, stop)
        lines += _torchrun_says([(culprit.rank, -6, culprit.pid)])
        return Ended(
            code=-6 if len(ranks) == 1 and not first.job.ddp else 1,
            duration_s=STARTED_S + over + 6.0,
            console=lines,
        )

    def _not_finite(self, order: Order, ranks: Sequence[Rank], stop: int) -> Ended:
        first = ranks[0]
        first.steps.loss[stop - 1] = float("nan")
        rundir.write_tables(order.folder, first, stop)
        over = float(first.steps.device_end_s[stop - 1])
        why = f"non-finite at step {stop}: loss nan, gradient norm nan"
        for rank in ranks:
            records = list(rank.lines(stop))
            told = rank.record(Event.NONFINITE, over + 4e-4, step=stop, phase=Phase.STEP)
            records += [{**told, "value": "nan"}, rank.end(over + 0.4, 11, why, stop)]
            self._write_beats(order, rank, records)
        self._samples(order, first, stop)
        lines = rundir.console(first.job, first.steps, stop)
        lines += _torchrun_says([(rank.rank, 11, rank.pid) for rank in ranks])
        return Ended(code=1, duration_s=STARTED_S + over + 2.0, console=lines)

    def _out_of_memory(
        self,
        order: Order,
        ranks: Sequence[Rank],
        ending: Ending,
        at: tuple[int, float],
        lines: list[str],
    ) -> Ended:
        stop, over = at
        why = f"out of memory: CUDA out of memory. Tried to allocate {ending.says} on GPU 0"
        for rank in ranks:
            code = ExitCode.OUT_OF_MEMORY if rank.rank == ending.rank else ExitCode.CRASH
            reason = why if rank.rank == ending.rank else "another rank ended: connection closed"
            records = list(rank.lines(stop, failed=stop + 1))
            records.append(
                rank.end(over + 0.3 + 0.1 * (rank.rank != ending.rank), code, reason, stop)
            )
            self._write_beats(order, rank, records)
        self._samples(order, ranks[0], stop)
        lines += _torchrun_says([(ending.rank, 12, ranks[ending.rank].pid)])
        return Ended(code=1, duration_s=STARTED_S + over + 2.0, console=lines)

    def _refused(self, job: Job) -> Ended:
        """No CUDA device answers any more."""
        says = "RuntimeError: No CUDA GPUs are available"
        lines = [f"[rank{job.ranks - 1}]: {says}"] if job.ranks > 1 else [says]
        lines += _torchrun_says([(job.ranks - 1, 1, 4_299_999)])
        return Ended(code=1, duration_s=9.0, console=lines)


def _torchrun_says(ended: Sequence[tuple[int, int, int]]) -> list[str]:
    """torchrun's own line about each child that failed first."""
    return [
        f"E0101 06:00:00.000000 4 torch/distributed/elastic/multiprocessing/api.py:1002] "
        f"failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of binary: python"
        for rank, code, pid in ended[:1]
    ]


def _watchdog_timeout(rank: Rank) -> list[str]:
    """ProcessGroupNCCL's words when a collective is not over in time."""
    head = f"[rank{rank.rank}]:[E101 06:20:00.0 ProcessGroupNCCL.cpp:683] "
    work = "WorkNCCL(SeqNum=287, OpType=ALLREDUCE, NumelIn=13107200, NumelOut=13107200, "
    return [
        f"{head}[Rank {rank.rank}] Watchdog caught collective operation timeout: {work}"
        "Timeout(ms)=900000) ran for 900012 milliseconds before timing out.",
        f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank.rank}] To avoid data inconsistency, we "
        "are taking the entire process down.",
    ]


def _watchdog_error(rank: Rank, says: str) -> list[str]:
    """ProcessGroupNCCL's words when its watchdog thread meets a CUDA error."""
    head = f"[rank{rank.rank}]:[E101 06:20:00.0 ProcessGroupNCCL.cpp:2057] "
    return [
        f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank.rank}] Process group watchdog thread "
        f"terminated with exception: CUDA error: {says}",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
    ]
