"""The training loop of one rank: blocks of steps, records, evaluation, checkpoints, ends."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from nsa.data.batch import Batch, Source
from nsa.ranges import count_ranges
from nsa.train import checkpoint
from nsa.train.arms import Block
from nsa.train.audit import KernelAudit
from nsa.train.bus import Agreed, Posted, post
from nsa.train.clock import Mark, StepClock
from nsa.train.effects import Seen, judge_all
from nsa.train.engine import Engine
from nsa.train.evaluate import validation_loss
from nsa.train.exits import ExitCode
from nsa.train.files import write_json
from nsa.train.heartbeat import Heartbeat
from nsa.train.launch import AUDITED, LaunchPlan
from nsa.train.log import say
from nsa.train.memory import write_snapshot
from nsa.train.process import GRACE_S, Termination
from nsa.train.profiling import StepProfiler
from nsa.train.record import Tables
from nsa.train.wrap import peak_cuda_mib

# DDP with a static graph rebuilds its buckets in its third step, otherwise in its second.
_EVIDENCE_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class End:
    """Why the loop ended."""

    code: ExitCode
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A step whose numbers are still on their way from the device."""

    step: int
    lr: float
    block: Block
    warmup: bool
    mark: Mark
    posted: Posted
    mem_mib: float


class Loop:
    """Runs the blocks of a plan on one rank."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        engine: Engine,
        source: Source,
        tables: Tables,
        heartbeat: Heartbeat,
        termination: Termination,
        run_dir: Path,
        first_batch: Batch | None,
        start_step: int,
    ) -> None:
        self.plan, self.engine, self.source = plan, engine, source
        self.tables, self.heartbeat, self.termination = tables, heartbeat, termination
        self.run_dir, self.ranks = run_dir, engine.ranks
        self.clock = StepClock(engine.device)
        self.step = start_step
        self.done = 0
        self.position: dict[str, Any] = {}
        self._early = first_batch
        self._pending: deque[_Pending] = deque()
        self._lag = 1 if engine.device.type == "cuda" else 0
        self._end: End | None = None
        self._halt = run_dir / ".HALT"
        self._audits: dict[str, Any] = {}
        self._gates: tuple[float, float] | None = None
        self.profiler: StepProfiler | None = None
        if plan.flags.profile_steps and self.ranks.rank == 0:
            self.profiler = StepProfiler(run_dir, plan.flags.profile_steps, engine.device.type)

    def run(self) -> End:
        """All blocks, until the last step or an agreed reason to stop."""
        for block in self.plan.blocks:
            if not self._enter(block):
                continue
            self._run_block(block)
            if self._end is not None:
                return self._finish(self._end)
            if self.plan.schedule is not None and self._enough():
                return self._finish(End(code=ExitCode.SUCCESS, reason="enough"))
        return self._finish(End(code=ExitCode.SUCCESS, reason="all steps done"))

    # -- blocks --------------------------------------------------------------------------------

    def _enter(self, block: Block) -> bool:
        """Put a block's toggles in force. False, on all ranks, where it cannot run on one."""
        self.engine.configure(block.toggles)
        if block.toggles.text("NSA_DDP_COMPRESS") != "off" and self.ranks.grouped:
            kind = block.toggles.text("NSA_DDP_COMPRESS")
            say(f"[ddp] gradient compression enabled: {kind}", rank=self.ranks.rank)
        if self.plan.schedule is None:
            return True
        error = self._probe(block)
        if not self.ranks.any(error is not None):
            return True
        text = error or "another rank could not run it"
        self.heartbeat.write("arm_failed", arm=block.arm, block=block.index, error=text)
        say(f"[arms] {block.arm} cannot run: {text}", rank=self.ranks.rank)
        return False

    def _probe(self, block: Block) -> str | None:
        if block.toggles.values["NSA_USE_TRITON_SEL"]:
            return "NSA_USE_TRITON_SEL=1: this build has no Triton kernel"
        if not any(block.toggles.flag(name) for name in AUDITED):
            return None
        if self._early is None:
            self._early = self.source.fetch()
        try:
            self.engine.probe(self._early)
        except RuntimeError as error:
            return " ".join(str(error).split())
        return None

    def _run_block(self, block: Block) -> None:
        last = self.plan.total_steps if self.plan.schedule is None else None
        self.clock.restart()
        evidence = _Evidence(self, block)
        for number in range(1, block.total_steps + 1):
            if last is not None and self.step >= last:
                break
            self.step += 1
            self._one_step(block, number <= block.warmup_steps, evidence)
            if self._end is not None:
                break
            self._between_steps()
            if self._end is not None:
                break
        self._drain()
        evidence.emit()

    def _enough(self) -> bool:
        found = self.ranks.any((self.run_dir / ".ENOUGH").exists())
        if found:
            self.heartbeat.write("enough")
        return found

    # -- one step ------------------------------------------------------------------------------

    def _one_step(self, block: Block, warmup: bool, evidence: _Evidence) -> None:
        beat, clock = self.heartbeat, self.clock
        beat.step, beat.phase = self.step, "data"
        beat.write("step_start")
        self._memory_dump("pre")
        if self.profiler and self.profiler.before_step():
            self.clock.restart()
        with clock.part("fetch"):
            batches = self._fetch()
        beat.phase = "first_step" if self.done == 0 else "step"
        beat.write("fetched")
        with evidence.watch():
            outcome = self.engine.compute(batches, clock)
            with clock.part("wait"):
                posted = post(
                    self.ranks,
                    loss=outcome.loss,
                    norm=outcome.norm,
                    strict_norm=not self.engine.scaler.is_enabled(),
                    halt=self._halt.exists(),
                    terminate=self.termination.reason is not None,
                )
            rate = self.engine.update(self.step, clock)
        if self._lag == 0:
            with clock.part("wait"):
                posted.read()
        self.position = batches[-1].position
        self.done += 1
        pending = _Pending(
            step=self.step,
            lr=rate,
            block=block,
            warmup=warmup,
            mark=clock.tick(),
            posted=posted,
            mem_mib=peak_cuda_mib() if self._lag else beat.memory.mib(),
        )
        self._pending.append(pending)
        while len(self._pending) > self._lag:
            self._settle(self._pending.popleft())
        if self.profiler and self.profiler.after_step():
            self._prove_nvtx(block)
            self.clock.restart()
        self._memory_dump("post")
        beat.write("step_end")
        if evidence.step_done():
            clock.restart()

    def _prove_nvtx(self, block: Block) -> None:
        """The saved trace proves the ranges; written once, when both profilers are done."""
        if self.profiler is None or self.profiler.active or self.profiler.summary is None:
            return
        if not block.toggles.flag("NSA_NVTX") or not self.profiler.complete:
            return
        version = "v2" if block.toggles.flag("NSA_SEL_RANGES_V2") else "v1"
        name = f"nsa.sel.ranges_{version}"
        found = name in self.profiler.summary["ranges"]
        evidence = {"range": name, "in_trace": found, "trace": "trace_rank0.json.gz"}
        self._effect(block, "NSA_NVTX", found, evidence)

    def _effect(self, block: Block, name: str, took: bool | None, evidence: Any) -> None:
        value = block.toggles.values[name]
        self.heartbeat.write(
            "effect",
            toggle=name,
            value=value,
            took_effect=took,
            evidence=evidence,
            arm=block.arm,
            block=block.index,
        )
        word = {True: "took effect", False: "had NO effect", None: "not judged here"}[took]
        say(f"[toggle] {name}={value}: {word} ({evidence})", rank=self.ranks.rank)

    def _fetch(self) -> list[Batch]:
        wanted = self.plan.config.train.accumulate_grad_batches
        batches = []
        if self._early is not None:
            batches.append(self._early)
            self._early = None
        while len(batches) < wanted:
            batches.append(self.source.fetch())
        return batches

    def _settle(self, item: _Pending) -> None:
        """Write what is now known about a step, and decide from it."""
        agreed, seconds = item.posted.read(), item.mark.seconds()
        tokens = self.plan.tokens_per_step
        rate = tokens / seconds if seconds > 0 else 0.0
        row = {
            "step": item.step,
            "loss": agreed.loss,
            "lr": item.lr,
            "toks_per_s": round(rate, 3),
            "tokens": tokens,
            "dt_s": round(seconds, 7),
            "grad_norm": agreed.grad_norm,
            "mem_mib": round(item.mem_mib, 1),
            "arm": item.block.arm,
            "block": item.block.index,
            "warmup": item.warmup,
            "fetch_s": round(item.mark.fetch_s, 7),
            "host_s": round(item.mark.host_s, 7),
        }
        self.tables.training(row)
        self._progress(item, agreed, rate)
        self.termination.grace_s = max(GRACE_S, 4 * seconds)
        self._decide(item, agreed)

    def _progress(self, item: _Pending, agreed: Agreed, rate: float) -> None:
        train = self.plan.config.train
        shown = item.step % train.log_every == 0 or self.done == 1
        if shown:
            stats = self.engine.model.gate_stats()
            self._gates = (stats.entropy, stats.max_gate)
            self.tables.gates(item.step, stats)
            arm = f" arm={item.block.arm}" if item.block.arm else ""
            say(
                f"[step {item.step}/{self.plan.total_steps}] loss={agreed.loss:.4f} "
                f"lr={item.lr:.3g} toks/s={rate:.1f} grad_norm={agreed.grad_norm:.3g}{arm}",
                rank=self.ranks.rank,
            )
        if item.step % int(self.plan.toggles.number("NSA_HEARTBEAT_EVERY")) == 0:
            self.heartbeat.write(
                "progress",
                step=item.step,
                loss=agreed.loss,
                toks_per_s=round(rate, 3),
                fetch_s=round(item.mark.fetch_s, 7),
                grad_norm=agreed.grad_norm,
                gate_entropy=self._gates[0] if self._gates else None,
                max_gate=self._gates[1] if self._gates else None,
            )

    def _decide(self, item: _Pending, agreed: Agreed) -> None:
        if self._end is not None:
            return
        if agreed.nonfinite:
            self.heartbeat.write("nonfinite", step=item.step, value=repr(agreed.loss))
            self._end = End(
                code=ExitCode.NONFINITE,
                reason=f"non-finite at step {item.step}: loss {agreed.loss!r}, gradient norm "
                f"{agreed.grad_norm!r}",
            )
        elif agreed.halt:
            self.heartbeat.write("halt", reason=".HALT")
            self._end = End(code=ExitCode.HALTED, reason=f".HALT at step {item.step}")
        elif agreed.terminate:
            name = self.termination.reason or "a signal on another rank"
            self._end = End(code=ExitCode.PREEMPTED, reason=f"{name} at step {item.step}")

    # -- between steps -------------------------------------------------------------------------

    def _between_steps(self) -> None:
        train = self.plan.config.train
        evaluate = bool(train.eval_every) and self.step % train.eval_every == 0
        save = bool(train.save_every) and self.step % train.save_every == 0
        if not evaluate and not save:
            return
        self._drain()
        if self._end is not None:
            return
        if evaluate:
            self._evaluate()
        if save:
            self._save()
        self.clock.restart()

    def _evaluate(self) -> None:
        beat, begin = self.heartbeat, perf_counter()
        beat.phase = "eval"
        beat.write("eval_start")
        loss = validation_loss(self.engine, self.source, self.plan.config.train.eval_batches)
        self.tables.val(self.step, loss)
        beat.write("eval", loss=loss, seconds=round(perf_counter() - begin, 4))
        say(f"[eval] step {self.step} loss={loss:.4f}", rank=self.ranks.rank)
        beat.sync()

    def _save(self) -> None:
        beat, begin = self.heartbeat, perf_counter()
        beat.phase = "checkpoint"
        beat.write("checkpoint_start")
        path = checkpoint.save(self.run_dir, self.engine, step=self.step, position=self.position)
        seconds = round(perf_counter() - begin, 4)
        beat.write("checkpoint", path=str(path.relative_to(self.run_dir)), seconds=seconds)
        say(f"[checkpoint] {path} in {seconds:.2f} s", rank=self.ranks.rank)
        self.tables.sync()
        beat.sync()

    def _drain(self) -> None:
        while self._pending:
            self._settle(self._pending.popleft())

    def _finish(self, end: End) -> End:
        """The last checkpoint, where one was asked for and the weights are worth keeping."""
        asked = self.plan.flags.save or (
            self.plan.config.train.save_every > 0 and end.code != ExitCode.SUCCESS
        )
        saved = (self.run_dir / "checkpoints" / f"step_{self.step}").exists()
        if asked and self.done and end.code != ExitCode.NONFINITE and not self.ranks.any(saved):
            self._save()
        return end

    def _memory_dump(self, when: str) -> None:
        every = int(self.plan.toggles.number("NSA_MEM_DUMP_EVERY"))
        if every and self.step % every == 0:
            write_snapshot(self.run_dir, self.heartbeat, when=when, step=self.step)

    def note_audit(self, arm: str, audit: KernelAudit) -> None:
        """Keep an arm's kernels and write sdpa_audit.json, where the audit was asked for."""
        self._audits[arm] = {"branches": audit.branches()}
        write_json(self.run_dir / "sdpa_audit.json", {"arms": self._audits})
        shown = ", ".join(f"{b}={k}" for b, k in audit.kernels().items())
        say(f"[sdpa] {arm or 'run'}: {shown}")


class _Evidence:
    """Watches the first steps of a block and then says which toggles took effect."""

    def __init__(self, loop: Loop, block: Block) -> None:
        self.loop, self.block = loop, block
        self._ranges: dict[str, int] | None = None
        self._forwards = loop.plan.config.train.accumulate_grad_batches
        self._audit: KernelAudit | None = None
        self._steps, self._emitted = 0, False
        wanted = any(block.toggles.flag(name) for name in AUDITED)
        # torch has one profiler: two at once crash the process.
        busy = loop.profiler is not None and loop.profiler.active
        if wanted and loop.ranks.rank == 0 and not busy:
            self._audit = KernelAudit(loop.engine.device.type)

    def watch(self) -> Any:
        """Around the compute part of a step; only the block's first one is looked at."""
        if self._steps:
            return nullcontext()
        return self._first()

    def _first(self) -> Any:
        from contextlib import ExitStack, contextmanager

        @contextmanager
        def both() -> Any:
            with ExitStack() as stack:
                counts = stack.enter_context(count_ranges())
                if self._audit is not None:
                    stack.enter_context(self._audit.watch())
                yield
            self._ranges = dict(counts)

        return both()

    def step_done(self) -> bool:
        """Count a step; emit once DDP has rebuilt its buckets. Says whether it emitted."""
        self._steps += 1
        if self._emitted or self._steps < 2:
            return False
        wrapped = self.loop.engine.wrapped
        grouped = wrapped is not None and wrapped.ddp is not None
        if grouped and self._steps < _EVIDENCE_STEPS and not self._bucket_sizes():
            return False
        self.emit()
        return True

    def _bucket_sizes(self) -> list[float] | None:
        wrapped = self.loop.engine.wrapped
        return wrapped.bucket_sizes_mib() if wrapped else None

    def emit(self) -> None:
        """Write `ddp_buckets` and one `effect` per toggle, once per block."""
        if self._emitted or not self._steps:
            return
        self._emitted = True
        loop, block = self.loop, self.block
        wrapped = loop.engine.wrapped
        sizes = self._bucket_sizes()
        if sizes is not None:
            loop.heartbeat.write("ddp_buckets", arm=block.arm, block=block.index, sizes_mib=sizes)
        if self._audit is not None and block.toggles.flag("NSA_SDPA_AUDIT"):
            loop.note_audit(block.arm, self._audit)
        wire = wrapped.wire.take() | {"steps": self._steps} if wrapped and wrapped.wire else None
        seen = Seen(
            engine=loop.engine,
            toggles=block.toggles,
            ranges=self._ranges or {},
            forwards=self._forwards,
            kernels=self._audit.kernels() if self._audit else None,
            wire=wire,
            has_board=loop.tables.has_board,
        )
        for name, took, evidence in judge_all(seen):
            # With a profiler, NVTX is judged from the trace, when there is one.
            if name != "NSA_NVTX" or loop.profiler is None:
                loop._effect(block, name, took, evidence)
