"""What toggles do in a rehearsed launch, as the trainer's evidence of each says it."""

from __future__ import annotations

from typing import Any

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.steps import Block, Job

MIB = 2**20
_BOOLEANS = frozenset({
    "NSA_PREFILL_BATCHED", "NSA_SEL_RANGES_V2", "NSA_OPT_FUSED", "NSA_SDPA_AUDIT", "NSA_NVTX",
    "NSA_SDPA_FLASH_ONLY", "NSA_SDPA_NO_FLASH", "NSA_USE_TRITON_SEL", "NSA_TB_DISABLE",
    "NSA_DISABLE_CSV_LOGS", "NSA_DISABLE_AUX_STATS", "NSA_CUDA_GRAPHS", "NSA_DDP_STATIC_GRAPH",
    "NSA_DDP_FIND_UNUSED", "NSA_DDP_DISABLE_GC",
})  # fmt: skip
# In force, and told of, in every block that does not set them.
ALWAYS = {
    "NSA_PREFILL_BATCHED": "0",
    "NSA_SEL_RANGES_V2": "1",
    "NSA_OPT_FUSED": "0",
    "NSA_DDP_BUCKET_MB": "25",
    "NSA_DDP_COMPRESS": "off",
}


def typed(name: str, text: str) -> bool | float | str:
    """A toggle's value as env.json and the heartbeats tell it."""
    if name in _BOOLEANS:
        return text == "1"
    try:
        return float(text)
    except ValueError:
        return text


def buckets(job: Job, block: Block) -> list[float]:
    """DDP fills buckets in the order in which gradients come, each to about its cap."""
    cap = float(block.settings.get("NSA_DDP_BUCKET_MB", "25"))
    left = job.shape.parameters * 4 / MIB
    sizes: list[float] = []
    while left > cap * 1.15:
        size = cap * (1.0 + 0.02 * (len(sizes) % 3))
        sizes.append(round(size, 4))
        left -= size
    return [*sizes, round(left, 4)]


def told_buckets(job: Job, block: Block) -> dict[str, list[float] | list[int]]:
    """The buckets as heartbeats tell them; the parameter that fills one has a fifth of it."""
    sizes = buckets(job, block)
    whole = [round(size * MIB) for size in sizes]
    return {"sizes_mib": sizes, "bytes": whole, "last_bytes": [size // 5 for size in whole]}


def effect(
    name: str, text: str, block: Block, *, job: Job, machine: Machine, first: bool
) -> tuple[bool | None, Any]:
    """Whether a toggle took effect, and the evidence; `first`: as rank 0 tells it."""
    ddp = job.ddp
    size = job.shape.parameters * 4
    if name == "NSA_PREFILL_BATCHED":
        return True, {"path": "batched", "range_calls_per_layer": 1.0}
    if name == "NSA_SEL_RANGES_V2":
        return True, {"ranges": ["nsa.sel.ranges_v2"], "operators_per_call": [24.0]}
    if name == "NSA_OPT_FUSED":
        kernels = ["_fused_adamw_"] if text == "1" else ["_foreach_add_", "_foreach_mul_"]
        return True, {"optimizer": "AdamW", "kernels": kernels, "fused": [text == "1"] * 2}
    if name == "NSA_DDP_COMPRESS":
        if text == "off":
            return True, {"hook": None}
        told = {"hook": text, "bytes_before": 2 * size, "bytes_after": size}
        return (True, told) if ddp else (False, "no DDP in this launch")
    if name == "NSA_DDP_BUCKET_MB":
        built = {"cap_mib": float(text), "sizes_mib": buckets(job, block)}
        return (True, built) if ddp else (False, "no DDP in this launch")
    if name in ("NSA_DDP_STATIC_GRAPH", "NSA_DDP_FIND_UNUSED"):
        return (True, {"asked": text == "1"}) if ddp else (False, "no DDP in this launch")
    if name == "NSA_DDP_DISABLE_GC":
        return True, {"asked": True, "running": False}
    if name == "NSA_CUDA_GRAPHS":
        layers = job.shape.layers * (text == "1")
        return True, {"replayed_layers": layers, "wanted": layers}
    if name.startswith("NSA_SDPA") or name == "NSA_USE_TRITON_SEL":
        ran = {"kernels": dict(machine.kernels)}
        return (True if first or name == "NSA_USE_TRITON_SEL" else None), ran
    return (True, {"in_force": typed(name, text)}) if first else (None, "rank 0 writes")
