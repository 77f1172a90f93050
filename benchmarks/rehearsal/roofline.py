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

# -- assumptions -----------------------------------------------------------------------------------
# Share of the data sheet's dense bf16 peak that products of this size reach.
PRODUCT_EFFICIENCY = 0.5
# Share of the data sheet's memory bandwidth that elementwise kernels reach.
MEMORY_EFFICIENCY = 0.7
# What the elementwise kernels of forward and backward move, for each token of a micro-batch.
BYTES_PER_TOKEN = 4.0e6
# Host: 2,400 operators of a micro-batch, launched in so many seconds.
OPERATORS, HOST_S = 2400, 0.023
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
class Shape:
    """The trained model, from its config file."""

    dim: int
    layers: int
    heads: int
    groups: int
    width: int
    hidden: int
    vocabulary: int
    seq_len: int
    block: int
    stride: int
    selected_block: int
    selected: int
    window: int

    def blocks_read(self, most: int) -> float:
        """Blocks that a query attends to, on average, where it may attend to so many."""
        own = (min(most, at // self.selected_block + 1) for at in range(self.seq_len))
        return sum(own) / self.seq_len

    @property
    def parameters(self) -> int:
        """Distinct parameters; input and output embedding are one."""
        queries_and_out = 2 * self.dim * self.heads * self.width
        keys_and_values = 2 * 3 * self.dim * self.groups * self.width
        gates = 3 * self.heads * (self.dim + 1)
        layer = queries_and_out + keys_and_values + gates + 3 * self.dim * self.hidden
        norms = 2 * self.dim
        return self.layers * (layer + norms) + self.dim + self.vocabulary * self.dim

    @property
    def attended(self) -> float:
        """Mean keys for each query: compressed, selected and window, as the paper counts them."""
        total = 0
        for position in range(1, self.seq_len + 1):
            total += max(0, (position - self.block) // self.stride + 1)
            whole_blocks = min((position - 1) // self.selected_block, self.selected - 1)
            total += whole_blocks * self.selected_block + (position - 1) % self.selected_block + 1
            total += min(self.window, position)
        return total / self.seq_len

    @property
    def model_flops_per_token(self) -> float:
        """What the model needs: 6 x parameters, and three times the attention's forward pass."""
        scores = 4 * self.heads * self.width * self.attended
        return 6.0 * self.parameters + 3.0 * self.layers * scores

    @property
    def masked_flops_per_token(self) -> float:
        """What the device does for attention: a masked kernel computes what is hidden, too.

        The selected branch over the whole sequence, the window over twice its width, the
        compressed branch over all blocks; backward is 2.5 forward passes.
        """
        keys = self.seq_len + 2 * self.window + self.seq_len // self.stride
        return 3.5 * self.layers * 4 * self.heads * self.width * keys


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What makes one GPU and its host faster or slower than the model says; 1: as it should."""

    clock: float = 1.0
    memory: float = 1.0
    host: float = 1.0
    fused: float = 1.0
    math: bool = False


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank does in a step."""

    shape: Shape
    sequences: int
    micro_batches: int
    ranks: int
    recompute: bool
    fused: bool
    bucket_mib: float
    wire_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step of one rank, and for how many of them its device computes."""

    compute_s: float
    waited_s: float
    busy_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.waited_s


def device_s(card: Card, work: Work, pace: Pace) -> float:
    """The device's time for one micro-batch."""
    shape, tokens = work.shape, work.sequences * work.shape.seq_len
    products = 6.0 * shape.parameters * tokens
    attention = shape.masked_flops_per_token * tokens
    if work.recompute:
        products, attention = products * CHECKPOINTING_FACTOR, attention * CHECKPOINTING_FACTOR
    if pace.math:
        attention *= MATH_ATTENTION_FACTOR
    moved = BYTES_PER_TOKEN * tokens
    return (
        products / (card.bf16_tflops * 1e12 * PRODUCT_EFFICIENCY * pace.clock)
        + attention / (card.masked_tflops * 1e12 * pace.clock)
        + moved / (card.memory_gb_s * 1e9 * MEMORY_EFFICIENCY * pace.memory)
    )


def all_reduce_s(work: Work, link_bytes_s: float) -> tuple[float, float]:
    """All gradients of a step over the link, and its last bucket alone."""
    if work.ranks < 2:
        return 0.0, 0.0
    share = 2 * (work.ranks - 1) / work.ranks
    size = work.shape.parameters * work.wire_bytes * share
    bucket = min(size, work.bucket_mib * 2**20 * work.wire_bytes / 4 * share)
    buckets = max(1.0, work.shape.parameters * 4 / 2**20 / work.bucket_mib)
    return (
        size / link_bytes_s + buckets * COLLECTIVE_LATENCY_S,
        bucket / link_bytes_s + COLLECTIVE_LATENCY_S,
    )


def step_time(card: Card, work: Work, pace: Pace, link_bytes_s: float) -> StepTime:
    """One step of one rank by itself; ranks that wait for each other take the slowest one's."""
    device, host = device_s(card, work, pace), HOST_S * pace.host
    micro = max(device, host)
    passes = UNFUSED_PASSES * (1.0 if not work.fused else 0.5 / pace.fused)
    updated = ADAMW_BYTES_PER_PARAMETER * work.shape.parameters * passes
    optimizer = updated / (card.memory_gb_s * 1e9 * MEMORY_EFFICIENCY * pace.memory)
    compute = work.micro_batches * micro + max(optimizer, STEP_HOST_S * pace.host)
    travel, last = all_reduce_s(work, link_bytes_s)
    waited = max(travel - BACKWARD_SHARE * micro, last)
    busy = work.micro_batches * device + optimizer + last
    return StepTime(compute_s=compute, waited_s=waited, busy_s=min(busy, compute + waited))
