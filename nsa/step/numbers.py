"""The numbers of a step: how long it takes, what the ranks agree on, the update and its rate.

Time is wall time of exactly that step, on CUDA between events. One small collective per step has
loss, halt, pre-emption, non-finite values and saves that ended. It is started before the optimizer
and read after it, so its latency hides behind the update. On CUDA it is read one step later,
through pinned memory and an event, so the step has no synchronization. What `nsa.witness` holds
these numbers against, it computes without this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from nsa.launch.ranks import Ranks
from nsa.settings import TrainSection


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The end of a step. fetch_s: the seconds that it waited for data."""

    wall_s: float
    fetch_s: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def seconds(self) -> float:
        """Duration of the step; on CUDA waits until the device has finished it."""
        if self.events is None:
            return self.wall_s
        begin, end = self.events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class StepClock:
    """Steps follow each other without a gap: a step begins where the one before ended, so the
    writing of a row counts for the next step. `restart` leaves out evaluation and checkpoints.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._fetch_s = 0.0
        self._begin = 0.0
        self._event: torch.cuda.Event | None = None
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._fetch_s = 0.0
        self._event = self._record()
        self._begin = perf_counter()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Count the enclosed time as waiting for data."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._fetch_s += perf_counter() - begin

    def tick(self) -> Mark:
        """The step ends here, the next one begins."""
        event, now = self._record(), perf_counter()
        wall = now - self._begin
        mark = Mark(
            wall_s=wall,
            fetch_s=self._fetch_s,
            events=(self._event, event) if self._event and event else None,
        )
        self._fetch_s = 0.0
        self._begin, self._event = now, event
        return mark

    def _record(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


# -- what the ranks agree on -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know about a step: mean loss, gradient norm before clipping, flags.

    `where` says on which ranks the loss was not finite; empty where it was on none. saved: the save
    that is under way has ended on every rank.
    """

    loss: float
    grad_norm: float
    where: str
    nonfinite: bool
    halt: bool
    terminate: bool
    saved: bool


class Arriving:
    """Numbers on their way from a device: who reads them waits for nothing that began later."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Tensor:
        """The numbers, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


class Posted:
    """A started collective; `read` waits for it and gives the same answer on every rank."""

    def __init__(self, values: Tensor, work: dist.Work | None, world_size: int) -> None:
        if values.is_cuda and work is not None:
            work.wait()  # orders the streams; the host does not wait
            work = None
        self._values, self._work, self._world_size = Arriving(values), work, world_size

    def wait(self) -> None:
        """Wait until the values are on this host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._values.read()

    def read(self) -> Agreed:
        """Wait for the collective, then say what was agreed."""
        self.wait()
        loss, norm, bad, mask, halt, terminate, saved = self._values.read().tolist()
        return Agreed(
            loss=loss / self._world_size,
            grad_norm=norm / self._world_size,
            where=_named(int(mask), self._world_size),
            nonfinite=bad > 0,
            halt=halt > 0,
            terminate=terminate > 0,
            saved=saved == self._world_size,
        )


# A float64 holds this many bits exactly, and so the sum of as many ranks' bits.
_MOST_RANKS = 53


def _bit(ranks: Ranks) -> float:
    """The rank's bit in the sum over all ranks; none in a group that is too large for it."""
    return 2.0**ranks.rank if ranks.world_size <= _MOST_RANKS else 0.0


def _named(mask: int, world_size: int) -> str:
    """Ranks whose bits are set, in words."""
    ranks = [str(rank) for rank in range(world_size) if mask >> rank & 1]
    if len(ranks) in (0, world_size):
        return "every rank" if ranks else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def post(
    ranks: Ranks,
    *,
    loss: Tensor,
    norm: Tensor,
    strict_norm: bool,
    halt: bool,
    terminate: bool,
    saved: bool,
) -> Posted:
    """Start the step's collective. `strict_norm`: a non-finite norm counts as non-finite too."""
    finite = torch.isfinite(loss)
    all_finite = finite & torch.isfinite(norm) if strict_norm else finite
    flags = torch.tensor([halt, terminate, saved], dtype=torch.float64)
    if ranks.device.type == "cuda":
        flags = flags.pin_memory().to(ranks.device, non_blocking=True)
    mine = (~finite).double() * _bit(ranks)
    seen = torch.stack([loss.double(), norm.double(), (~all_finite).double(), mine])
    values = torch.cat([seen, flags])
    work = dist.all_reduce(values, async_op=True) if ranks.world_size > 1 else None
    return Posted(values, work, ranks.world_size)


# -- the optimizer: AdamW, plain or fused, and its rate --------------------------------------------

# The cosine ends at this share of the learning rate.
FINAL_LR_SHARE = 0.1


def learning_rate(step: int, train: TrainSection, *, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 1): a linear ramp, then cosine down to a tenth."""
    peak, warmup_steps = train.lr, train.warmup_steps
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if train.lr_schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    share = FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * share


def new_optimizer(model: nn.Module, train: TrainSection, *, fused: bool) -> AdamW:
    """AdamW over the model's parameters; what is no matrix does not decay."""
    # fused=None, not False: with False torch would also drop its multi-tensor kernels, and
    # the comparison would be against a loop over parameters.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=train.lr, betas=(0.9, 0.95), fused=fused or None)


def switched(optimizer: AdamW, model: nn.Module, train: TrainSection, *, fused: bool) -> AdamW:
    """A new optimizer with the state of this one, fused or not."""
    device = next(model.parameters()).device
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["fused"] = fused or None
    for entry in state["state"].values():
        # The fused kernel keeps its step count on the device, the others on the host.
        entry["step"] = entry["step"].to(device if fused else "cpu")
    made = new_optimizer(model, train, fused=fused)
    made.load_state_dict(state)
    return made


def is_fused(optimizer: AdamW) -> bool:
    """Does the optimizer itself say that it runs the fused kernel?"""
    return all(bool(group["fused"]) for group in optimizer.param_groups)
