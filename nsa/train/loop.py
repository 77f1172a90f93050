"""The training loop of one rank: blocks of steps, evaluation, checkpoints, the end."""

from __future__ import annotations

from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

from nsa.contract import COMPRESSION_LINE, ELSEWHERE, ENOUGH_FILE, HALT_FILE, Event, ExitCode, Phase
from nsa.data import Batch, Source
from nsa.launch.asked import Block
from nsa.launch.output import Heartbeat, say
from nsa.launch.process import Termination
from nsa.launch.ranks import in_force
from nsa.step.compiled import Refused
from nsa.step.ddp import peak_cuda_mib, peak_reserved_mib
from nsa.step.dispatch import needs_trial, trial_step
from nsa.step.engine import Engine, StepOutcome
from nsa.step.numbers import Arriving, Posted, StepClock, post
from nsa.train.settle import End, Evaluations, Pending, Settler, Tables
from nsa.witness.witness import Witness

if TYPE_CHECKING:
    from nsa.train.checkpoint import Saves


class Loop:
    """Runs the blocks of a plan on one rank."""

    def __init__(
        self,
        engine: Engine,
        *,
        source: Source,
        heartbeat: Heartbeat,
        termination: Termination,
        run_dir: Path,
        first_batch: Batch | None = None,
        start_step: int = 0,
        owed: bool = False,
    ) -> None:
        """`owed`: the step before the first was to be evaluated, and was not."""
        self.plan, self.engine, self.source = engine.plan, engine, source
        self.heartbeat, self.termination = heartbeat, termination
        self.run_dir, self.ranks = run_dir, engine.ranks
        self.tables = Tables(run_dir, rank=self.ranks.rank, toggles=self.plan.toggles)
        self.clock = StepClock(engine.device)
        self._halt = run_dir / HALT_FILE
        self.settler = Settler(
            engine,
            tables=self.tables,
            heartbeat=heartbeat,
            termination=termination,
            halt_file=self._halt,
        )
        self.witness = Witness(engine, heartbeat=heartbeat, run_dir=run_dir, first=start_step + 1)
        self._proven = False
        self._last: Batch | None = None
        self.step, self.done = start_step, 0
        self.position: dict[str, Any] = {}
        self.evaluations = Evaluations(
            engine, tables=self.tables, heartbeat=heartbeat, witness=self.witness
        )
        self._saves = _saves(run_dir, engine, heartbeat)
        self._read: dict[str, Any] | None = None
        self._owed = owed
        self._early = [] if first_batch is None else [first_batch]
        self._dump_every = int(self.plan.toggles.number("NSA_MEM_DUMP_EVERY"))

    def run(self) -> End:
        """All blocks, until the last step or an agreed reason to stop."""
        for block in self.plan.blocks:
            if not self.enter(block):
                continue
            if not self._proven:
                self._proven = True
                self.witness.before_launch(self._first_batch())
            if self._owed:
                self._owed, self.heartbeat.step = False, self.step
                self.evaluations.run(self.step, self.source)
            self._run_block(block)
            if self.settler.end is not None:
                return self._finish(self.settler.end)
            if self.plan.schedule is not None and self._enough():
                return self._finish(End(code=ExitCode.SUCCESS, reason="enough"))
        return self._finish(End(code=ExitCode.SUCCESS, reason="all steps done"))

    # -- blocks --------------------------------------------------------------------------------

    def enter(self, block: Block) -> bool:
        """Put a block's toggles in force. False, on all ranks, where it cannot run on one."""
        try:
            # Another optimizer goes on with the weights and moments of the one before.
            with self.witness.unchanged():
                self.engine.configure(block.toggles)
        except Refused as refused:
            if self.plan.schedule is None:
                raise
            self._cannot(block, str(refused))
            return False
        self.witness.compiling.note("block")
        kind = block.toggles.text("NSA_DDP_COMPRESS")
        if kind != "off" and self.ranks.grouped:
            say(f"{COMPRESSION_LINE}{kind}", rank=self.ranks.rank)
        if self.plan.schedule is None:
            return True
        error, engine = None, self.engine
        if needs_trial(block.toggles):
            tokens = self._first_batch().tokens.to(engine.device)
            error = trial_step(engine.model, lambda: engine.loss(tokens, wrapped=False))
        if not self.ranks.any(error is not None):
            return True
        self._cannot(block, error or f"{ELSEWHERE} could not run it")
        return False

    def _cannot(self, block: Block, text: str) -> None:
        self.heartbeat.write(Event.ARM_FAILED, arm=block.arm, block=block.index, error=text)
        say(f"[arms] {block.arm} cannot run: {text}", rank=self.ranks.rank)

    def _first_batch(self) -> Batch:
        """What the next step will begin with, looked at before it."""
        if not self._early:
            self._early = [self.source.fetch()]
        return self._early[0]

    def accounts(self) -> dict[str, Any]:
        """What the exit event says beside the end: what was seen, and what each part counts."""
        return {
            **self.witness.facts(),
            "saved": self._read,
            "in_force": in_force(self.ranks),
        }

    def begin(self, block: Block) -> None:
        """The steps of a block that was entered begin."""
        running = {
            **self.tables.running(),
            "NSA_HEARTBEAT_EVERY": self.settler.every,
            "NSA_MEM_DUMP_EVERY": self._dump_every,
        }
        self.witness.begin_block(block, running)
        self.clock.restart()

    def _run_block(self, block: Block) -> None:
        steps = block.total_steps
        if self.plan.schedule is None:
            steps -= self.step  # a resumed run has done some already
        self.begin(block)
        for number in range(1, steps + 1):
            self.one_step(block, number <= block.warmup_steps)
            if self.settler.end is None:
                self._between_steps()
            if self.settler.end is not None:
                break
        self.settler.drain()
        self.witness.end_block()

    def _enough(self) -> bool:
        found = self.ranks.any((self.run_dir / ENOUGH_FILE).exists())
        if found:
            self.heartbeat.write(Event.ENOUGH)
        return found

    # -- one step ------------------------------------------------------------------------------

    def one_step(self, block: Block, warmup: bool) -> None:
        """One optimizer step, with everything that is written about it."""
        self.step += 1
        beat, clock, witness = self.heartbeat, self.clock, self.witness
        beat.step, beat.phase = self.step, Phase.DATA
        beat.write(Event.STEP_START)
        self._memory_dump("pre")
        if witness.begin_trace():
            clock.restart()
        with clock.fetching():
            batches = self._fetch()
        beat.phase = Phase.STEP if self.done else Phase.FIRST_STEP
        beat.write(Event.FETCHED)
        if witness.before(self.step, batches):
            clock.restart()
        outcome = self.engine.compute(batches, witness.forward())
        posted = self._post(outcome)
        with witness.update():
            rate = self.engine.update(self.step)
        seen = witness.after(self.step, loss=outcome.loss, norm=outcome.norm, rate=rate)
        if self.settler.lag == 0 or witness.profiles:
            posted.wait()
        self._last = batches[-1]
        self.position = self._last.position
        self.done += 1
        mem_mib = peak_cuda_mib() if self.settler.lag else beat.memory.mib()
        reserved = round(peak_reserved_mib(), 1) if self.settler.lag else None
        told = {
            **seen,
            "mem_mib": round(mem_mib, 1),
            "reserved_mib": reserved,
            "cpu_s": round(process_time(), 6),
        }
        mark = clock.tick()
        # At once: what is written about the step, to TensorBoard too, is time of the next one.
        beat.write(Event.STEP_END, **told)
        reads_gates = self.settler.reads_gates(self.step)
        self.settler.add(
            Pending(
                step=self.step,
                lr=rate,
                block=block,
                warmup=warmup,
                mark=mark,
                posted=posted,
                mem_mib=mem_mib,
                gates=Arriving(self.engine.model.gate_numbers()) if reads_gates else None,
            )
        )
        if witness.end_trace():
            clock.restart()
        self._memory_dump("post")
        if witness.written(timed=not warmup):
            clock.restart()

    def _post(self, outcome: StepOutcome) -> Posted:
        return post(
            self.ranks,
            loss=outcome.loss,
            norm=outcome.norm,
            strict_norm=not self.engine.scaler.is_enabled(),
            halt=self._halt.exists(),
            terminate=self.termination.reason is not None,
            saved=self._saves is not None and self._saves.done,
        )

    def _fetch(self) -> list[Batch]:
        wanted = self.plan.config.train.accumulate_grad_batches
        batches, self._early = self._early, []
        while len(batches) < wanted:
            batches.append(self.source.fetch())
        return batches

    def _memory_dump(self, when: str) -> None:
        if self._dump_every and self.step % self._dump_every == 0:
            self.heartbeat.snapshot(when=when)

    # -- between steps -------------------------------------------------------------------------

    def _between_steps(self) -> None:
        if self._saves is not None and self.settler.saved:
            self._saves.finish()
        train = self.plan.config.train
        evaluate = bool(train.eval_every) and self.step % train.eval_every == 0
        due = bool(train.save_every) and self.step % train.save_every == 0
        saves = self._saves if due else None
        if not evaluate and saves is None:
            return
        # What was agreed about the last steps decides whether they are worth keeping.
        self.settler.drain()
        if self.settler.end is not None:
            return
        if evaluate:
            with self.witness.unchanged():
                self.evaluations.run(self.step, self.source)
        if saves is not None:
            with self.witness.unchanged():
                self._save(saves)
        self.clock.restart()

    def _save(self, saves: Saves) -> None:
        saves.begin(
            step=self.step,
            position=self.position,
            val_loss=self.evaluations.losses.get(self.step),
        )
        # All steps are settled: what any of them said was about the save before.
        self.settler.saved = False

    def _finish(self, end: End) -> End:
        """The last proof and checkpoint, where the weights are worth it and one was asked for."""
        if end.code == ExitCode.SUCCESS and self._last is not None:
            self.witness.end(self._last)
        self.termination.saving = True
        if self._saves is not None:
            self._save_last(self._saves, end)
        self.tables.sync()
        self.heartbeat.sync()
        return end

    def _save_last(self, saves: Saves, end: End) -> None:
        asked = self.plan.flags.save or end.code != ExitCode.SUCCESS
        saves.finish()
        saved = saves.has(self.step)
        if asked and self.done and end.code != ExitCode.NONFINITE and not self.ranks.any(saved):
            self._save(saves)
            saves.finish()
        if end.code == ExitCode.SUCCESS:
            self._read = saves.read_back()


def _saves(run_dir: Path, engine: Engine, heartbeat: Heartbeat) -> Saves | None:
    """None in a launch that saves nothing, which can do without loading what writes checkpoints."""
    if not engine.plan.saves:
        return None
    from nsa.train.checkpoint import Saves

    return Saves(run_dir, engine, heartbeat)
