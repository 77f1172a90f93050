"""Gradient compression on the wire: a communication hook for DDP that works on gloo and NCCL.

torch's own bf16 hook refuses gloo. This file has no `from __future__ import annotations`,
because DDP compares the hook's annotations with the real types.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

WIRE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class WireStats:
    """What the hook saw since the last `take`: bytes before and after, and the types."""

    wire_dtype: torch.dtype
    world_size: int
    bytes_before: int = 0
    bytes_after: int = 0
    buckets: int = 0
    gradient_dtypes: set[str] = field(default_factory=set)

    def take(self) -> dict[str, int | str | list[str]]:
        """The counts so far, which start again at zero."""
        seen: dict[str, int | str | list[str]] = {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "buckets": self.buckets,
            "gradient_dtype": "+".join(sorted(self.gradient_dtypes)),
            "wire_dtype": str(self.wire_dtype).removeprefix("torch."),
        }
        self.bytes_before = self.bytes_after = self.buckets = 0
        self.gradient_dtypes = set()
        return seen


def compressed_all_reduce(stats: WireStats, bucket: GradBucket) -> Future[Tensor]:
    """Mean of a bucket over the ranks, sent in the narrow type, given back in the gradient's."""
    gradient = bucket.buffer()
    # Divided before the cast, so that a sum in fp16 cannot overflow.
    wire = gradient.div_(stats.world_size).to(stats.wire_dtype)
    stats.bytes_before += gradient.numel() * gradient.element_size()
    stats.bytes_after += wire.numel() * wire.element_size()
    stats.buckets += 1
    stats.gradient_dtypes.add(str(gradient.dtype).removeprefix("torch."))

    def widen(done: Future[list[Tensor]]) -> Tensor:
        reduced: Tensor = done.value()[0]
        return gradient.copy_(reduced)

    future: Future[list[Tensor]] = dist.all_reduce(wire, async_op=True).get_future()
    return future.then(widen)
