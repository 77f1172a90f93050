"""What toggles do in a rehearsed launch, as the trainer's evidence of each says it."""

from __future__ import annotations

from typing import Any

from benchmarks.rehearsal.trainer.steps import Block, Job

MIB = 2**20
# In force, and told of, in every block that does not set them.
ALWAYS = {
    "NSA_PREFILL_BATCHED": "0",
    "NSA_SEL_RANGES_V2": "1",
    "NSA_OPT_FUSED": "0",
    "NSA_DDP_BUCKET_MB": "25",
    "NSA_DDP_COMPRESS": "off",
}


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


def effect(name: str, text: str, job: Job) -> tuple[bool, Any]:
    """Whether a toggle took effect, and the evidence."""
    if name.startswith("NSA_DDP_") and text != "off" and not job.ddp:
        return False, "no DDP in this launch"
    if name == "NSA_DDP_COMPRESS" and text != "off":
        size = job.shape.parameters * 4
        return True, {"hook": text, "bytes_before": 2 * size, "bytes_after": size}
    return True, "seen"
