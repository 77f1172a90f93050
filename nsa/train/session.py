"""One launch from start to exit code, on one rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa.attention import tracing
from nsa.contract import (
    ELSEWHERE,
    OUT_OF_MEMORY_PREFIX,
    PARTED,
    CheckpointError,
    Event,
    ExitCode,
    Phase,
)
from nsa.data import Batch, DataStallError, Source, open_source
from nsa.data.text import DataError
from nsa.launch.envfile import announce, effective, write_env
from nsa.launch.output import MIB, Heartbeat, keep_no_large_block, say, shout
from nsa.launch.plan import LaunchPlan
from nsa.launch.process import Termination, by_hand, link_latest, open_run_dir
from nsa.launch.ranks import Ranks, choose_device, parameter_hash, start_ranks, write_flight
from nsa.settings import ConfigError
from nsa.step.dispatch import is_out_of_memory
from nsa.step.engine import Engine
from nsa.train.loop import Loop
from nsa.train.settle import End
from nsa.witness.self_test import SelfTest, self_test


@dataclass(kw_only=True)
class Ending:
    """What the exit event will say."""

    end: End = field(default_factory=lambda: End(code=ExitCode.CRASH, reason="unknown"))
    steps_done: int = 0
    param_hash: str | None = None
    accounts: dict[str, Any] = field(default_factory=dict)


# Not freed before the process is gone: freeing a process group joins its threads with Python's lock
# held, and one of them may be waiting for that lock, since a save's last collective ends in it.
_KEPT: list[_Session] = []


def train(plan: LaunchPlan, termination: Termination) -> int:
    """Run the launch; returns the exit code after it was written as the last heartbeat."""
    beat = Heartbeat(rank=plan.place.rank, token=plan.run_token or "")
    ending = Ending()
    session = _Session(plan, termination, beat, ending)
    _KEPT.append(session)
    grouped = plan.ddp and plan.place.world_size > 1
    return run_rank(session.run, ending, beat, termination, grouped=grouped)


def run_rank(
    work: Callable[[], None],
    ending: Ending,
    beat: Heartbeat,
    termination: Termination,
    *,
    grouped: bool,
) -> int:
    """Do a rank's work, which says how it ended; returns the code of its last heartbeat."""
    termination.on_forced_exit = lambda why: _write_exit(
        beat, Ending(end=End(code=ExitCode.PREEMPTED, reason=why), steps_done=beat.step)
    )
    if grouped:
        beat.on_exit = termination.on_usr2 = lambda: _keep_flight(beat)
    try:
        work()
    except (ConfigError, DataError, CheckpointError) as error:
        ending.end = End(code=ExitCode.CONFIG, reason=str(error))
        shout(f"[rank {beat.rank}] {error}")
    except Exception as error:  # noqa: BLE001 - the rank's last word; its process ends with it
        ending.end = _crash_end(error)
        _write_exit(beat, ending)
        shout(f"[rank {beat.rank}] {ending.end.reason}")
        # Not raised again: tearing torch down would keep the other ranks waiting for half a second.
        # Through the hook, because torch's puts the rank before every line.
        sys.excepthook(type(error), error, error.__traceback__)
        return int(ending.end.code)
    _write_exit(beat, ending)
    return int(ending.end.code)


def _crash_end(error: Exception) -> End:
    """The end that an exception means."""
    text = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return End(code=ExitCode.OUT_OF_MEMORY, reason=f"{OUT_OF_MEMORY_PREFIX}{text}")
    if isinstance(error, DataStallError):
        return End(code=ExitCode.CRASH, reason=f"data_stall: {error}")
    return End(code=ExitCode.CRASH, reason=text)


def _keep_flight(beat: Heartbeat) -> None:
    """Write the rank's latest collectives beside its heartbeats; where that fails, say so."""
    if beat.run_dir is None:
        return
    try:
        write_flight(beat.run_dir, rank=beat.rank, token=beat.token, reason=beat.phase)
    except OSError as error:
        shout(f"[rank {beat.rank}] the flight record could not be written: {error}")


def _write_exit(beat: Heartbeat, ending: Ending) -> None:
    if beat.on_exit is not None:
        beat.on_exit()
    beat.phase = Phase.EXIT
    try:
        beat.write(
            Event.EXIT,
            code=int(ending.end.code),
            reason=ending.end.reason,
            steps_done=ending.steps_done,
            param_hash=ending.param_hash,
            **ending.accounts,
        )
        beat.sync()
    except OSError as error:
        shout(f"[rank {beat.rank}] the exit event could not be written: {error}")


class _Session:
    def __init__(
        self, plan: LaunchPlan, termination: Termination, beat: Heartbeat, ending: Ending
    ) -> None:
        self.plan, self.termination, self.beat, self.ending = plan, termination, beat, ending
        self.started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.notes: list[str] = []
        self.resumed: dict[str, Any] | None = None
        self.owed = False
        self.loop: Loop | None = None

    def run(self) -> None:
        plan, beat = self.plan, self.beat
        if plan.run_dir is not None:
            self._open(plan.run_dir)
        device = choose_device(plan)
        if device.type == "cuda":
            beat.cuda_mib = lambda: round(torch.cuda.memory_allocated() / MIB, 1)
        else:
            keep_no_large_block()
        ranks = start_ranks(plan, device)
        run_dir = plan.run_dir or self._by_hand(ranks)
        if plan.toggles.flag("NSA_NVTX"):
            tracing.enable_nvtx(True)
        engine = Engine(plan, ranks)
        tested = self_test(engine)
        source, first = self._source(ranks)
        start_step = self._resume(engine, source, plan.flags.resume) if plan.flags.resume else 0
        if first is None:
            beat.phase = Phase.DATA
            beat.write(Event.DATA_START)
            first = source.fetch()
        if ranks.rank == 0:
            self._describe(run_dir, engine, source, tested)
            if plan.run_dir is None:
                # Only now: whoever resumes from `latest` needs to find what it went on from.
                link_latest(run_dir, plan.config.train.out_dir)
        beat.phase = Phase.INIT
        beat.write(Event.INIT_DONE)
        beat.sync()
        loop = Loop(
            engine,
            source=source,
            heartbeat=beat,
            termination=self.termination,
            run_dir=run_dir,
            first_batch=first,
            start_step=start_step,
            owed=self.owed,
        )
        self.termination.in_loop = True
        try:
            self.ending.end = loop.run()
        finally:
            self.ending.steps_done = loop.done
        source.close()
        self.ending.accounts = loop.accounts()
        self.loop = loop
        self._check_equal(loop)
        ranks.end()

    def _open(self, run_dir: Path) -> None:
        open_run_dir(run_dir, self.plan.place, self.beat, grouped=self.plan.ddp)

    def _by_hand(self, ranks: Ranks) -> Path:
        """A directory of this launch's own, and the token in its name."""
        run_dir = Path(ranks.from_rank0(str(by_hand(self.plan.config.train.out_dir))))
        self.beat.token = run_dir.name.rpartition("-")[2]
        self._open(run_dir)
        say(f"[run] {run_dir}", rank=ranks.rank)
        return run_dir

    def _source(self, ranks: Ranks) -> tuple[Source, Batch | None]:
        """The asked source, or synthetic data on all ranks where it fails and that is allowed.

        A source that may fail gives its first batch here, so that failing is noticed now.
        """
        data = self.plan.config.data
        if data.dataset in ("synthetic", "markov"):
            return self._open_source(data.dataset), None
        self.beat.phase = Phase.DATA
        self.beat.write(Event.DATA_START)
        resuming = self.plan.flags.resume is not None
        problem: Exception | None = None
        try:
            source = self._open_source(data.dataset)
            first = None if resuming else source.fetch()
        except (DataError, DataStallError) as error:
            if not data.synthetic_on_fail:
                raise
            problem = error
        if not data.synthetic_on_fail or not ranks.any(problem is not None):
            return source, first
        why = problem or f"{ELSEWHERE} could not read it"
        text = f"SYNTHETIC DATA instead of {data.dataset} (--synthetic-on-fail): {why}"
        self.notes.append(text)
        say(f"[data] {text}", rank=ranks.rank)
        return self._open_source("synthetic"), None

    def _open_source(self, dataset: str) -> Source:
        self.dataset_used = dataset
        data = self.plan.config.data.model_copy(update={"dataset": dataset})
        return open_source(data, self.plan.share)

    def _resume(self, engine: Engine, source: Source, path: Path) -> int:
        # Here alone: reading checkpoints takes half a second to load.
        from nsa.train import restore

        restored = restore.load(path, engine)
        source.seek(restored.position)
        every = self.plan.config.train.eval_every
        # The end of that run left out an evaluation that was due.
        self.owed = every > 0 and restored.step % every == 0 and not restored.evaluated
        for line in restored.refused:
            text = f"damaged checkpoint refused, the one before it is used: {line}"
            self.notes.append(text)
            say(f"[resume] {text}", rank=engine.ranks.rank)
        self.resumed = {
            "path": str(restored.path),
            "step": restored.step,
            "sha256": restored.sha256,
            "refused": list(restored.refused),
        }
        self.notes.append(f"resumed after step {restored.step} from {restored.path}")
        say(f"[resume] {restored.path} (step {restored.step})", rank=engine.ranks.rank)
        if restored.step >= self.plan.total_steps:
            raise ConfigError(
                f"--resume {restored.path}: step {restored.step} is not before the last step "
                f"{self.plan.total_steps}; raise --steps"
            )
        return restored.step

    def _describe(self, run_dir: Path, engine: Engine, source: Source, tested: SelfTest) -> None:
        plan = self.plan
        facts = effective(
            plan,
            device=engine.device,
            n_params=engine.model.n_parameters(),
            floor=source.floor_nats,
            floor_source=source.floor_source,
        )
        facts["dataset"] = self.dataset_used
        selected = engine.dispatch.selected(plan.toggles)
        kernels = engine.dispatch.kernels(plan.toggles)
        attention = {
            "window": {"value": kernels, "reason": selected.reason},
            "selected": vars(selected),
            "self_test": tested.describe(),
        }
        told = {
            "run_token": self.beat.token,
            "started_at": self.started_at,
            "effective": facts,
            "attention": attention,
            "resumed": self.resumed,
            "notes": self.notes,
        }
        write_env(run_dir, plan, engine.device, told)
        announce(plan, facts, attention)

    def _check_equal(self, loop: Loop) -> None:
        """DDP is checked, not assumed: every rank must hold the same parameters."""
        self.ending.param_hash = parameter_hash(loop.engine.model)
        if not loop.ranks.same_everywhere(self.ending.param_hash):
            self.ending.end = End(
                code=ExitCode.CRASH,
                reason=f"{PARTED} ({loop.witness.parted()}): DDP did not keep them equal "
                f"(the run had ended with: {self.ending.end.reason})",
            )
            shout(f"[rank {loop.ranks.rank}] {self.ending.end.reason}")
