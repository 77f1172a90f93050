"""Batched prefill for CPUs: explicit matrix products on cache-sized pieces, own backward pass.

The fused attention kernels of a CPU reach about half of its matrix rate at these shapes, and know
no block sparsity. Here each piece is a plain product that runs at full rate, a group's query
heads are rows of one matrix (so keys are never expanded), and probabilities are recomputed in
the backward pass from the saved log-sum-exp instead of being stored.
"""

from __future__ import annotations

from nsa.attention.cpu.function import batched_cpu

__all__ = ["batched_cpu"]
