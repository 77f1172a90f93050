"""One small collective per step: loss, halt, pre-emption, non-finite values, saves that ended.

It is started before the optimizer and read after it, so its latency hides behind the update. On
CUDA it is read one step later, through pinned memory and an event, so the step has no
synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.launch.ranks import Ranks


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
