"""One optimizer step: forward, backward, clipping, update, in the asked precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa.attention.selection import full_float32
from nsa.contract import ELSEWHERE
from nsa.data import Batch
from nsa.launch.asked import why_not
from nsa.launch.output import say
from nsa.launch.plan import LaunchPlan
from nsa.launch.ranks import Ranks
from nsa.model import NSALanguageModel, mean_loss
from nsa.rounding import Gap
from nsa.step import compiled
from nsa.step import cuda_graphs as replay
from nsa.step.ddp import Wrapped
from nsa.step.dispatch import LAYERS, REPLAY, Dispatch, allow_kernels
from nsa.step.numbers import is_fused, learning_rate, new_optimizer, switched
from nsa.toggles import AUTO, ToggleSet

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Tensors of one step, still on the device: mean loss of this rank, norm before clipping."""

    loss: Tensor
    norm: Tensor


class Engine:
    """Model, optimizer and DDP wrapper of one rank."""

    def __init__(self, plan: LaunchPlan, ranks: Ranks) -> None:
        self.plan, self.ranks, self.device = plan, ranks, ranks.device
        torch.manual_seed(plan.config.train.seed)
        if self.device.type == "cuda":
            allow_tf32()
        self.model = NSALanguageModel(plan.model_config()).to(self.device)
        self.model.train()
        toggles = plan.toggles
        self.optimizer = new_optimizer(
            self.model, plan.config.train, fused=toggles.flag("NSA_OPT_FUSED")
        )
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            enabled=plan.config.runtime.precision == "fp16",
            init_scale=toggles.number("NSA_SCALER_INIT_SCALE"),
            growth_interval=int(toggles.number("NSA_SCALER_GROWTH_INTERVAL")),
            growth_factor=toggles.number("NSA_SCALER_GROWTH_FACTOR"),
            backoff_factor=toggles.number("NSA_SCALER_BACKOFF_FACTOR"),
        )
        self.wrapped: Wrapped | None = None
        self.dispatch = Dispatch(plan, self.model.cfg, dtype=self.dtype, device=self.device)
        self.graphs: compiled.Graphs | None = None
        self.gaps: list[Gap] = []
        self.on_loss: Callable[[Tensor], None] | None = None
        self.before_clipping: Callable[[], None] | None = None
        self._made: compiled.Graphs | None = None
        self._agreed: dict[Hashable, list[Gap]] = {}
        self._recorded: Hashable = None
        self.replay_gap: Gap | None = None

    def configure(self, toggles: ToggleSet) -> None:
        """Put the toggles of a block in force: kernels, ranges, layers, optimizer, DDP.

        Raises Refused where layers or their selected branch cannot run as asked by name here, or
        the former give other numbers. What is `auto` runs the slow way then, and `dispatch` has
        the reason. A collective.
        """
        allow_kernels(toggles)
        self.model.attend_by(self.dispatch.way(toggles))
        self._use_kernels(toggles)
        fused = toggles.flag("NSA_OPT_FUSED")
        if is_fused(self.optimizer) != fused:
            self.optimizer = switched(
                self.optimizer, self.model, self.plan.config.train, fused=fused
            )
        if self.wrapped is not None:
            self.wrapped.take_off()
        self._record(toggles)
        self.wrapped = Wrapped(self.model, self.ranks, toggles)
        if self.plan.config.train.accumulate_grad_batches > 1:
            zeros = torch.zeros(self.plan.micro_batch, dtype=torch.int64, device=self.device)
            with self.autocast():
                self.wrapped.prime(zeros)

    @property
    def dtype(self) -> torch.dtype:
        """The type of attention's inputs."""
        return self._half or torch.float32

    @property
    def _half(self) -> torch.dtype | None:
        """What autocast multiplies in; None without."""
        return _AUTOCAST.get(self.plan.config.runtime.precision)

    @property
    def uses_ddp(self) -> bool:
        """Is the model wrapped in DDP?"""
        return self.wrapped is not None and self.wrapped.ddp is not None

    @property
    def holds_parameters(self) -> bool:
        """Is there a recording or a compilation that knows the parameters as they are now?"""
        return self.model.recording is not None or self.graphs is not None

    def _use_kernels(self, toggles: ToggleSet) -> None:
        """Let the layers run as asked, once they are known to agree with our own modules."""
        problem = why_not(toggles, self.device.type)
        if problem is not None:
            raise compiled.Refused(problem)
        self.graphs, self.model.compiled, self.gaps = None, None, []
        if toggles.text(LAYERS) == "off":
            return
        why = self._compile(toggles)
        # All ranks or none: what comes next is a collective.
        if self.ranks.any(why is not None):
            self.graphs, self.model.compiled = None, None
            self._bar(LAYERS, toggles, why)

    def _compile(self, toggles: ToggleSet) -> str | None:
        """Compile the layers and hold them against our modules: why they may not run, or None."""
        choice = self.dispatch.layers(toggles)
        if choice.value == "off":
            return choice.reason
        if self._made is None:
            self._made = compiled.compile_layers()
        self.graphs, self.model.compiled = self._made, self._made.layer
        state = self.dispatch.state(toggles)
        if state not in self._agreed:
            try:
                self._agreed[state] = compiled.compare(
                    self.model,
                    self._mean_loss,
                    tokens=self.plan.micro_batch,
                    autocast=self.autocast,
                    half=self._half,
                )
            except RuntimeError as error:
                if toggles.text(LAYERS) != AUTO:
                    raise
                return f"cannot run here: {_line(error)}"
        self.gaps = self._agreed[state]
        wide = "; ".join(str(gap) for gap in self.gaps if gap.too_wide)
        return f"does not agree with our own modules on this device ({wide})" if wide else None

    def _record(self, toggles: ToggleSet) -> None:
        """Record the layers where asked, once a replay is known to give what the host gives."""
        if not toggles.flag(REPLAY):
            self._forget()
            return
        # What a recording depends on; a block that changes none of it keeps the recording.
        asked = (self.dispatch.state(toggles), self.model.compiled is not None)
        if asked == self._recorded:
            return
        self._forget()
        why = self._replay(toggles)
        if self.ranks.any(why is not None):
            self._forget()
            self._bar(REPLAY, toggles, why)
        else:
            self._recorded = asked

    def _replay(self, toggles: ToggleSet) -> str | None:
        """Record the layers and replay them once: why they may not be replayed, or None."""
        choice = self.dispatch.replay(toggles)
        if choice.value == "0":
            return choice.reason
        if self.model.cfg.gradient_checkpointing:
            return (
                "gradient checkpointing runs layers a second time, which a recording does not; "
                "switch one of the two off"
            )
        try:
            self.model.recording = replay.Recording(
                self.model, self.plan.micro_batch, self.autocast
            )
        except RuntimeError as error:
            return f"cannot be recorded: {_line(error)}"
        gap = self.replay_gap = self.compare_replay()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the comparison is no part of the training
        return f"does not give what the host gives ({gap})" if gap.too_wide else None

    def _forget(self) -> None:
        self.model.recording, self._recorded, self.replay_gap = None, None, None

    def _bar(self, name: str, toggles: ToggleSet, why: str | None) -> None:
        """The slow way runs where the fast one was `auto`; Refused where it was asked for."""
        why, asked = why or f"{ELSEWHERE} says that it cannot be used", toggles.values[name]
        if asked != AUTO:
            told, remedy = ("1", "set it to 0") if asked is True else (asked, "unset it")
            raise compiled.Refused(f"{name}={told}: {why}; {remedy}")
        self.dispatch.bar(name, toggles, why)
        say(f"[auto] {name}: not used, {why}", rank=self.ranks.rank)

    def compare_replay(self) -> Gap:
        """A replayed pass held against the same pass launched by the host."""
        loss = partial(self.loss, wrapped=False)
        tokens = self.plan.micro_batch
        return replay.replay_gap(self.model, loss, self._exact_loss, tokens, self._half)

    def _exact_loss(self, tokens: Tensor) -> Tensor:
        """The loss in float32 throughout: branches by masks, no autocast, no TF32."""
        with self.model.exactly(), full_float32():
            return mean_loss(self.model(tokens[:, :-1]), tokens[:, 1:])

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of forward passes; master weights stay in fp32."""
        if self._half is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._half)

    def loss(self, tokens: Tensor, *, wrapped: bool = True) -> Tensor:
        """Mean next-token loss in nats of tokens [B, S+1] on the device."""
        call = self.wrapped if wrapped and self.wrapped is not None else self.model
        with self.autocast():
            logits = call(tokens[:, :-1])
        return self._mean_loss(logits, tokens[:, 1:])

    def _mean_loss(self, logits: Tensor, following: Tensor) -> Tensor:
        function = mean_loss if self.graphs is None else self.graphs.loss
        return function(logits, following)

    def compute(
        self, batches: list[Batch], watch: AbstractContextManager[None] | None = None
    ) -> StepOutcome:
        """Forward and backward over the micro-batches, then the clipped gradient."""
        loss = self.gradients(batches, watch)
        if self.before_clipping is not None:
            self.before_clipping()
        return StepOutcome(loss=loss, norm=self.clip())

    def gradients(
        self, batches: list[Batch], watch: AbstractContextManager[None] | None = None
    ) -> Tensor:
        """Forward and backward over the micro-batches: this rank's mean loss, detached.

        watch: entered around the first forward pass only. A profiler must not be closed while a
        collective that it saw begin is under way: that corrupts the heap.
        """
        watch = watch or nullcontext()
        if self.wrapped is None:
            raise RuntimeError("configure() comes before the first step")
        total: Tensor | None = None
        for number, batch in enumerate(batches, 1):
            tokens = batch.on(self.device)
            with self.wrapped.gradient_scope(last=number == len(batches)):
                with watch if number == 1 else nullcontext():
                    loss = self.loss(tokens) / len(batches)
                    if self.on_loss is not None and number == 1:
                        self.on_loss(loss)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if number == 1 < len(batches) and self.model.recording is not None:
                replay.keep_gradients(self.model.layers.parameters())
            total = loss.detach() if total is None else total + loss.detach()
        if total is None:
            raise RuntimeError("a step needs at least one micro-batch")
        return total

    def update(self, step: int) -> float:
        """The optimizer's step; returns the learning rate that was used."""
        rate = self.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def rate(self, step: int) -> float:
        """Learning rate of an optimizer step."""
        return learning_rate(step, self.plan.config.train, total_steps=self.plan.schedule_steps)

    def clip(self) -> Tensor:
        """Clip the gradients to the config's norm; returns the norm that they had."""
        self.scaler.unscale_(self.optimizer)
        limit = self.plan.config.train.grad_clip or math.inf
        parameters = list(self.model.parameters())
        norm: Tensor = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return norm


def allow_tf32() -> None:
    """Let CUDA round float32 products to TF32, in matrix products and in cuDNN (E17)."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def _line(error: BaseException) -> str:
    """An error's text as one line; what a compiler adds about its own traces is left out."""
    return next(iter(str(error).strip().split("\n\n")), "").replace("\n", " ") or repr(error)
