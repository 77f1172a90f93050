"""DistributedDataParallel around the model: options, compression, bucket sizes, taking it off.

torch's own bf16 hook refuses gloo, so the communication hook is ours. This file has no
`from __future__ import annotations`, because DDP compares the hook's annotations with real types.
"""

import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from nsa.launch.output import MIB
from nsa.launch.ranks import Ranks
from nsa.toggles import ToggleSet

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
    """Mean of a bucket over the ranks, sent in the narrow type, given back in the gradient's.

    One rank alone rounds as several do, and sends nothing.
    """
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

    if stats.world_size == 1:
        alone: Future[Tensor] = Future()
        alone.set_result(gradient.copy_(wire))
        return alone
    future: Future[list[Tensor]] = dist.all_reduce(wire, async_op=True).get_future()
    return future.then(widen)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Bytes that DDP sends at once, and those of the last parameter that it put in there."""

    size: int
    last: int

    @property
    def size_mib(self) -> float:
        """MiB, as they are shown."""
        return round(self.size / MIB, 4)


def _numbers(text: str) -> list[int]:
    """The numbers of a text that separates them by commas or blanks."""
    return [int(number) for number in text.replace(",", " ").split()]


def _filled(sizes: list[int], parameters: list[int]) -> list[Bucket]:
    """Buckets of these sizes, filled with parameters of these bytes one after the other."""
    left = iter(parameters)
    made = []
    for size in sizes:
        inside = last = 0
        while inside < size:
            last = next(left)
            inside += last
        made.append(Bucket(size=size, last=last))
    return made


class Wrapped:
    """The model as the step calls it: through DDP, or as it is for a single process."""

    def __init__(self, module: nn.Module, ranks: Ranks, toggles: ToggleSet) -> None:
        self.module = module
        self.ddp: DistributedDataParallel | None = None
        self.wire: WireStats | None = None
        self.static_graph = toggles.flag("NSA_DDP_STATIC_GRAPH")
        if not ranks.grouped:
            return
        self.ddp = DistributedDataParallel(
            module,
            device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
            bucket_cap_mb=toggles.number("NSA_DDP_BUCKET_MB"),
            find_unused_parameters=toggles.flag("NSA_DDP_FIND_UNUSED"),
            static_graph=self.static_graph,
            gradient_as_bucket_view=not toggles.flag("NSA_DDP_SAFE_MODE"),
        )
        kind = toggles.text("NSA_DDP_COMPRESS")
        if kind in WIRE_TYPES:
            self.wire = WireStats(wire_dtype=WIRE_TYPES[kind], world_size=ranks.world_size)
            self.ddp.register_comm_hook(self.wire, compressed_all_reduce)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [B,S,V] of tokens [B,S]."""
        logits: Tensor = (self.ddp or self.module)(tokens)
        return logits

    def gradient_scope(self, *, last: bool) -> AbstractContextManager[None]:
        """Without communication for all but the last micro-batch of a step."""
        return nullcontext() if self.ddp is None or last else self.ddp.no_sync()

    def prime(self, tokens: Tensor) -> None:
        """Let a static graph see one synchronized pass over tokens [B,S], with zero gradients.

        Without it torch 2.13 fails an internal assertion when the first pass is not synchronized
        (accumulation), and synchronizing the first step's every micro-batch would round
        compressed gradients differently there than in all other steps.
        """
        if self.ddp is None or not self.static_graph:
            return
        (self(tokens).float().sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        for parameter in self.module.parameters():
            parameter.grad = None
        if self.wire is not None:
            self.wire.take()

    def buckets(self) -> list[Bucket] | None:
        """The buckets in use; None until DDP has rebuilt them after its first steps.

        While it searches for unused parameters DDP keeps the buckets that it began with.
        """
        if self.ddp is None:
            return None
        data = self.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        kept = self.ddp.find_unused_parameters and not self.static_graph
        if not kept and not data.get("has_rebuilt_buckets"):
            return None
        own = [
            p.numel() * p.element_size()
            for name, p in self.module.named_parameters()
            if p.requires_grad and name not in self.ddp.parameters_to_ignore
        ]
        sizes = _numbers(data["bucket_sizes" if kept else "rebuilt_bucket_sizes"])
        if not kept:
            filled = _numbers(data["rebuilt_per_bucket_param_indices"])
            return _filled(sizes, [own[place] for place in filled])
        # It filled these with the parameters as the model lists them, and then turned them round.
        return _filled(sizes[::-1], own)[::-1]

    def cap_bytes(self) -> int | None:
        """The cap of a bucket that DDP itself goes by; None without DDP."""
        return None if self.ddp is None else int(self.ddp.bucket_bytes_cap)

    def take_off(self) -> None:
        """Remove DDP's hooks from the parameters, so that the model can be wrapped anew."""
        if self.ddp is None:
            return
        for parameter in self.module.parameters():
            parameter.grad = None  # may be a view of a bucket
        self.ddp.reducer._remove_autograd_hooks()
        self.ddp = None
        gc.collect()


def peak_cuda_mib() -> float:
    """Most memory that tensors took on the GPU so far, activations included, MiB."""
    return torch.cuda.max_memory_allocated() / MIB


def peak_reserved_mib() -> float:
    """Most memory that the allocator held on the GPU so far, its gaps included, MiB."""
    return torch.cuda.max_memory_reserved() / MIB
