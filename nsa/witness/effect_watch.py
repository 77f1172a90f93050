"""Watching a block's first steps: which kernels really ran, and which toggles took effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nsa.attention.tracing import OperatorCount, count_ranges
from nsa.contract import (
    ATTEND_RANGE,
    CMP_RANGE,
    SDPA_AUDIT_JSON,
    SELECTION_RANGES,
    TRACE_FILE,
    WIN_RANGE,
    Event,
    proof_text,
)
from nsa.data import Batch
from nsa.launch.asked import Block
from nsa.launch.output import Heartbeat, say, write_json
from nsa.launch.plan import AUDITED
from nsa.step.compiled import backward_nodes
from nsa.step.ddp import Bucket
from nsa.step.engine import Engine
from nsa.witness.effects import UNWATCHED, Seen, judge_all
from nsa.witness.profiling import StepProfiler, torch_profiler

_BRANCH_RANGES = {"cmp": CMP_RANGE, "sel": ATTEND_RANGE, "win": WIN_RANGE}
# Part of an operator's name, and the kernel that it stands for.
_KERNELS = (
    ("_scaled_dot_product_flash_attention", "flash"),
    ("_scaled_dot_product_efficient_attention", "efficient"),
    ("_scaled_dot_product_cudnn_attention", "cudnn"),
    ("_scaled_dot_product_attention_math", "math"),
    ("nsa::", "triton"),
)
# Softmax by hand is a softmax operator, or the exponentials that make one up.
_SOFTMAX = ("aten::_softmax", "aten::softmax", "aten::exp", "aten::exp_", "aten::exp2_")
# DDP with a static graph rebuilds its buckets in its third step, otherwise in its second.
_EVIDENCE_STEPS = 4
_WORDS = {True: "took effect", False: "had NO effect", None: "unproven"}


@contextmanager
def audited(device_type: str) -> Iterator[dict[str, Counter[str]]]:
    """Profile the enclosed work; afterwards this holds its operators, by branch."""
    found: dict[str, Counter[str]] = {}
    with torch_profiler(device_type) as profiler:
        yield found
    found.update(operators_by_branch(profiler.function_events))


def operators_by_branch(events: Any) -> dict[str, Counter[str]]:
    """Operators that matter for attention, under the branch range that encloses them."""
    found: dict[str, Counter[str]] = {branch: Counter() for branch in _BRANCH_RANGES}
    branch_of = {name: branch for branch, name in _BRANCH_RANGES.items()}
    for event in events:
        if event.name not in _SOFTMAX and not any(part in event.name for part, _ in _KERNELS):
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name not in branch_of:
            parent = parent.cpu_parent
        if parent is not None:
            found[branch_of[parent.name]][event.name] += 1
    return found


def kernel_name(ops: Counter[str]) -> str:
    """flash, efficient, cudnn, math, triton, explicit_softmax, several joined by +, or none."""
    names = {kernel for part, kernel in _KERNELS for op in ops if part in op}
    if names:
        return "+".join(sorted(names))
    return "explicit_softmax" if any(op in _SOFTMAX for op in ops) else "none"


class EffectLog:
    """Writes effects to the heartbeat and the log, and kernels to sdpa_audit.json."""

    def __init__(self, heartbeat: Heartbeat, run_dir: Path) -> None:
        self.heartbeat, self.run_dir = heartbeat, run_dir
        self._audits: dict[str, Any] = {}

    def effect(self, block: Block, name: str, took: bool | None, evidence: Any) -> None:
        """One toggle of a block: did it take effect, and what shows it."""
        value = block.toggles.values[name]
        self.heartbeat.write(
            Event.EFFECT,
            toggle=name,
            value=value,
            took_effect=took,
            evidence=evidence,
            arm=block.arm,
            block=block.index,
        )
        say(
            f"[toggle] {name}={value}: {_WORDS[took]} ({proof_text(evidence)})",
            rank=self.heartbeat.rank,
        )

    def audit(self, arm: str, audit: Mapping[str, Counter[str]]) -> None:
        """Keep an arm's kernels, with the operators and their counts, and write the file anew."""
        kernels = {branch: kernel_name(ops) for branch, ops in audit.items()}
        branches = {
            branch: {"kernel": kernel, "ops": dict(sorted(audit[branch].items()))}
            for branch, kernel in kernels.items()
        }
        self._audits[arm] = {"branches": branches}
        write_json(self.run_dir / SDPA_AUDIT_JSON, {"arms": self._audits})
        shown = ", ".join(f"{branch}={kernel}" for branch, kernel in kernels.items())
        say(f"[sdpa] {arm or 'run'}: {shown}")

    def prove_nvtx(self, block: Block, profiler: StepProfiler) -> None:
        """Once both profilers are done: the saved trace proves the ranges, or their absence."""
        if not (profiler.summary and block.toggles.flag("NSA_NVTX")):
            return
        version = "v2" if block.toggles.flag("NSA_SEL_RANGES_V2") else "v1"
        name = SELECTION_RANGES[version]
        found = name in profiler.summary["ranges"]
        evidence = {"range": name, "in_trace": found, "trace": TRACE_FILE}
        self.effect(block, "NSA_NVTX", found, evidence)


class BlockEvidence:
    """Looks at the first step of a block, and emits once DDP has settled its buckets."""

    def __init__(
        self,
        block: Block,
        *,
        log: EffectLog,
        engine: Engine,
        profiler: StepProfiler | None,
        running: Mapping[str, Any],
    ) -> None:
        self.block, self.log, self.engine = block, log, engine
        self.profiler = profiler
        self._seen = Seen(engine=engine, toggles=block.toggles, running=running)
        self._audit: Mapping[str, Counter[str]] | None = None
        self._steps, self.emitted, self._counted = 0, False, False
        self._call_hook = ExitStack()
        wanted = any(block.toggles.flag(name) for name in AUDITED)
        # torch has one profiler: two at once crash the process.
        busy = profiler is not None and profiler.active
        self._audits = wanted and engine.ranks.rank == 0 and not busy

    def look_apart(self, batch: Batch) -> bool:
        """Count everything in a pass of its own, where graphs run the layers; says whether it did.

        They show nothing, and the modules round otherwise: no step may go another way than the
        next, nor than the same one of a launch that goes on from a checkpoint.
        """
        engine = self.engine
        if self._counted or (engine.model.recording is None and engine.model.compiled is None):
            return False
        with self._first():
            engine.loss(batch.tokens.to(engine.device), wrapped=False)
        self._seen.layer_calls = 0
        if engine.model.recording is not None:
            # Layers that are replayed are not called, and those that are called are not replayed.
            self._call_hook.close()
        return True

    def watch(self) -> AbstractContextManager[None]:
        """Around the first forward pass of a step: only those of the block's first two are seen.

        In the first one everything is counted; the second is a step like all others.
        """
        if not self._counted:
            return self._first()
        if self._steps == 1 and any(self.block.toggles.is_set(n) for n in UNWATCHED):
            return self._looking()
        return nullcontext()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Note the graph of the enclosed pass's loss."""

        def look(loss: Tensor) -> None:
            self._seen.unwatched = backward_nodes(loss)

        self.engine.on_loss = look
        try:
            yield
        finally:
            self.engine.on_loss = None

    def _called(self, _layer: nn.Module, _inputs: object) -> None:
        self._seen.layer_calls += 1

    @contextmanager
    def _first(self) -> Iterator[None]:
        self._counted = True
        # To the end of the step: what is recomputed is called in the backward pass.
        hook = self.engine.model.layers[0].register_forward_pre_hook(self._called)
        self._call_hook.callback(hook.remove)
        audit = audited(self.engine.device.type) if self._audits else nullcontext()
        with count_ranges() as self._seen.ranges, audit as self._audit:
            yield

    def judge_steps(self, compiled_in_steps: int) -> None:
        """The block is over: a graph that was compiled in its timed steps spoils their times."""
        if compiled_in_steps and self.block.toggles.text("NSA_COMPILE") != "off":
            why = {"compiled_in_timed_steps": compiled_in_steps}
            self.log.effect(self.block, "NSA_COMPILE", False, why)

    def watch_update(self) -> AbstractContextManager[Any]:
        """Around the optimizer's step; only the block's first one is looked at."""
        if self._steps:
            return nullcontext()
        operators = OperatorCount()
        self._seen.update = operators.names
        return operators

    def step_done(self) -> bool:
        """Count a step; emit once DDP has rebuilt its buckets. Says whether it emitted."""
        self._steps += 1
        self._call_hook.close()
        if self.emitted or self._steps < 2:
            return False
        if self.engine.uses_ddp and self._steps < _EVIDENCE_STEPS and not self._buckets():
            return False
        self.emit()
        return True

    def emit(self) -> None:
        """Write `ddp_buckets` and one `effect` per toggle, once per block."""
        if self.emitted or not self._steps:
            return
        self.emitted = True
        block, buckets = self.block, self._buckets()
        if buckets is not None:
            self.log.heartbeat.write(
                Event.DDP_BUCKETS,
                arm=block.arm,
                block=block.index,
                sizes_mib=[bucket.size_mib for bucket in buckets],
                bytes=[bucket.size for bucket in buckets],
                last_bytes=[bucket.last for bucket in buckets],
            )
        if self._audit is not None and block.toggles.flag("NSA_SDPA_AUDIT"):
            self.log.audit(block.arm, self._audit)
        if self._audit is not None:
            self._seen.kernels = {name: kernel_name(ops) for name, ops in self._audit.items()}
        wrapped = self.engine.wrapped
        if wrapped and wrapped.wire:
            self._seen.wire = wrapped.wire.take() | {"steps": self._steps}
        for name, took, evidence in judge_all(self._seen):
            # With a profiler, NVTX is judged from the trace, when there is one.
            if name != "NSA_NVTX" or self.profiler is None:
                self.log.effect(block, name, took, evidence)

    def _buckets(self) -> list[Bucket] | None:
        wrapped = self.engine.wrapped
        return wrapped.buckets() if wrapped else None
