"""How long a training step takes: the roofline model of the rehearsal. Nothing here was measured.

A micro-batch takes as long as the slower of two: the device (products at a share of the data
sheet's peak, attention with an explicit mask, bytes over memory) and the host, which launches
2,400 operators in 23 ms (results/step_calls.md counts the operators; the time is an estimate of
this project for one core of a server). Gradients travel while the last micro-batch's backward pass
runs; what does not fit behind it, and the last bucket, is waited for.

The constants that no document gives are assumptions, and stand together here.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rehearsal.hardware import Card
from benchmarks.rehearsal.trainer.job import Job, bucket_mib, wire
from nsa.launch.asked import Block

# -- assumptions -----------------------------------------------------------------------------------
# Share of the data sheet's dense bf16 peak that products of this size reach.
PRODUCT_EFFICIENCY = 0.5
# Share of the data sheet's memory bandwidth that elementwise kernels reach.
MEMORY_EFFICIENCY = 0.7
# What the elementwise kernels of forward and backward move, for each token of a micro-batch.
BYTES_PER_TOKEN = 4.0e6
# Host: 2,400 operators of a micro-batch, launched in so many seconds.
HOST_S = 0.023
# Host, besides: clipping, the optimizer's launch, statistics, heartbeats.
STEP_HOST_S = 0.0015
# A backward pass is two thirds of a micro-batch; gradients hide behind it.
BACKWARD_SHARE = 2 / 3
# One all-reduce, whatever its size.
COLLECTIVE_LATENCY_S = 4.0e-5
# All-reduce over PCIe of one generation and x16, bytes per second and direction: a ring over the
# host bridge reaches about two thirds of the link (PCI-SIG: 15.75 GB/s for generation 3 and x16).
PCIE_BYTES_S = {3: 10.0e9, 4: 20.0e9, 5: 40.0e9}
# Recomputing activations costs one more forward pass.
CHECKPOINTING_FACTOR = 4 / 3
# AdamW reads and writes parameter, gradient and both moments; twice, where it is not fused.
ADAMW_BYTES_PER_PARAMETER = 28.0
UNFUSED_PASSES = 2.0
# Math attention writes its scores and probabilities out, in float32.
MATH_ATTENTION_FACTOR = 5.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What makes one GPU and its host faster or slower than the model says; 1: as it should."""

    clock: float = 1.0
    memory: float = 1.0
    host: float = 1.0
    fused: float = 1.0
    math: bool = False


def masked_flops_per_token(job: Job) -> float:
    """What the device does for attention: a masked kernel computes what is hidden, too.

    The selected branch over the whole sequence, the window over twice its width, the compressed
    branch over all blocks; backward is 2.5 forward passes.
    """
    cfg, seq_len = job.model.attention, job.train.seq_len
    keys = seq_len + 2 * cfg.w + seq_len // cfg.d
    return 3.5 * job.model.n_layers * 4 * cfg.n_heads * cfg.d_k * keys


def device_s(card: Card, job: Job, pace: Pace) -> float:
    """The device's time for one micro-batch."""
    tokens = job.plan.per_rank_batch * job.train.seq_len
    products = 6.0 * job.parameters * tokens
    attention = masked_flops_per_token(job) * tokens
    if job.model.gradient_checkpointing:
        products, attention = products * CHECKPOINTING_FACTOR, attention * CHECKPOINTING_FACTOR
    if pace.math:
        attention *= MATH_ATTENTION_FACTOR
    moved = BYTES_PER_TOKEN * tokens
    return (
        products / (card.bf16_tflops * 1e12 * PRODUCT_EFFICIENCY * pace.clock)
        + attention / (card.masked_tflops * 1e12 * pace.clock)
        + moved / (card.memory_gb_s * 1e9 * MEMORY_EFFICIENCY * pace.memory)
    )


def all_reduce_s(job: Job, block: Block, link_bytes_s: float) -> tuple[float, float]:
    """All gradients of a step over the link, and its last bucket alone."""
    if job.ranks < 2:
        return 0.0, 0.0
    share = 2 * (job.ranks - 1) / job.ranks * (1.0 if wire(block) == "fp32" else 0.5)
    size = job.gradient_mib * 2**20 * share
    bucket = min(size, bucket_mib(block) * 2**20 * share)
    buckets = max(1.0, job.gradient_mib / bucket_mib(block))
    return (
        size / link_bytes_s + buckets * COLLECTIVE_LATENCY_S,
        bucket / link_bytes_s + COLLECTIVE_LATENCY_S,
    )


def step_time(
    card: Card, job: Job, block: Block, pace: Pace, link_bytes_s: float
) -> tuple[float, float, float]:
    """One step of one rank by itself: seconds of computing, of waiting for the link, and those in
    which its device computes. Ranks that wait for each other take the slowest one's.
    """
    device, host = device_s(card, job, pace), HOST_S * pace.host
    micro = max(device, host)
    fused = block.toggles.flag("NSA_OPT_FUSED")
    passes = UNFUSED_PASSES * (0.5 / pace.fused if fused else 1.0)
    updated = ADAMW_BYTES_PER_PARAMETER * job.parameters * passes
    optimizer = updated / (card.memory_gb_s * 1e9 * MEMORY_EFFICIENCY * pace.memory)
    compute = job.train.accumulate_grad_batches * micro + max(optimizer, STEP_HOST_S * pace.host)
    travel, last = all_reduce_s(job, block, link_bytes_s)
    waited = max(travel - BACKWARD_SHARE * micro, last)
    busy = job.train.accumulate_grad_batches * device + optimizer + last
    return compute, waited, min(busy, compute + waited)
