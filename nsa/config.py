"""Shapes of the attention and of the language model, and the FLOPs that they need. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nsa.contract import NSAError, raise_problems

Phi = Literal["avg", "mlp"]
Path = Literal["sequential", "batched"]
Ranges = Literal["v1", "v2"]
# By what attention runs off the CPU: torch's SDPA with masks, or this package's kernels, for all
# branches and the choice of blocks.
Kernels = Literal["masked", "triton"]

# One initial and two local blocks are always selected, and they count towards n_sel.
FORCED_INITIAL_BLOCKS = 1
FORCED_LOCAL_BLOCKS = 2
MIN_N_SEL = FORCED_INITIAL_BLOCKS + FORCED_LOCAL_BLOCKS

# Of every layer: of the angles of rotary positions, and under the root of each norm.
ROPE_BASE, NORM_EPS = 10_000.0, 1e-6


@dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """Shape of one Native Sparse Attention layer (arXiv 2502.11089).

    dim: model width. n_heads: query heads H. n_kv_groups: key/value groups G; q heads
    g*(H/G) .. (g+1)*(H/G)-1 share group g. d_k, d_v: widths of a key and of a value head.
    l: tokens in a compression block. d: its stride. l_sel: tokens in a selection block.
    n_sel: blocks selected, the three forced ones included. w: window in tokens, the current one
    included. phi: how a block is compressed, mean ("avg") or a learned MLP ("mlp").

    The defaults are the production shape. Raises NSAError (a ValueError) that lists every
    wrong number.
    """

    dim: int = 768
    n_heads: int = 12
    n_kv_groups: int = 2
    d_k: int = 64
    d_v: int = 64
    l: int = 32  # noqa: E741 - the paper's name
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16
    w: int = 512
    phi: Phi = "avg"

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name != "phi"}
        errors = [
            f"{name}={value!r}: must be a whole number of at least 1"
            for name, value in numbers.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        raise_problems("NSAConfig", errors or self._relation_errors())

    def _relation_errors(self) -> list[str]:
        errors = []
        if self.n_heads % self.n_kv_groups:
            errors.append(
                f"n_heads={self.n_heads} is not a multiple of n_kv_groups={self.n_kv_groups}: "
                "every group needs the same number of query heads"
            )
        for name in ("l", "l_sel"):
            if getattr(self, name) % self.d:
                errors.append(
                    f"{name}={getattr(self, name)} is not a multiple of d={self.d}: "
                    "choose a stride d that divides both l and l_sel"
                )
        if self.n_sel < MIN_N_SEL:
            errors.append(
                f"n_sel={self.n_sel}: must be at least {MIN_N_SEL}, because one initial and two "
                "local blocks are always among the selected"
            )
        return errors

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value group."""
        return self.n_heads // self.n_kv_groups

    def n_compressed(self, seq_len: int) -> int:
        """Complete compression blocks in `seq_len` tokens: block i covers [i*d, i*d + l)."""
        return max(0, (seq_len - self.l) // self.d + 1)

    def n_blocks(self, seq_len: int) -> int:
        """Selection blocks in `seq_len` tokens, the last one possibly partial."""
        return -(-seq_len // self.l_sel)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How attention runs, whatever its shape; every way computes the same.

    path: "sequential" (token by token) or "batched" (fast).
    selection_ranges: "v1" plain loops, "v2" vectorized. use_flash: False avoids fused kernels.
    force_sdpa: run batched prefill through SDPA on the CPU too, so that restrictions on its
    kernels have something to act on. kernels: by what attention runs off the CPU, whether it can
    run or not (`choose_selected`).
    """

    path: Path = "batched"
    selection_ranges: Ranges = "v2"
    use_flash: bool = True
    force_sdpa: bool = False
    kernels: Kernels = "masked"

    def by_sdpa(self, device_type: str) -> bool:
        """Does a call run through scaled_dot_product_attention?"""
        return self.path == "batched" and (device_type != "cpu" or self.force_sdpa)


BATCHED = Way()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and execution options of the language model.

    mlp_ratio: width of the SwiGLU hidden layer over dim (8/3 gives 2048 at dim 768).
    way: how attention runs. gradient_checkpointing: recompute each layer in the backward pass.
    Raises NSAError for an odd d_k.
    """

    vocab_size: int
    n_layers: int
    attention: NSAConfig = field(default_factory=NSAConfig)
    mlp_ratio: float = 8 / 3
    tie_embeddings: bool = True
    way: Way = BATCHED
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.attention.d_k % 2:
            problem = f"attention.d_k={self.attention.d_k}: must be even for rotary positions"
            raise NSAError(problem)

    @property
    def mlp_hidden(self) -> int:
        """Width of the SwiGLU hidden layer."""
        return max(1, round(self.mlp_ratio * self.attention.dim))


def keys_touched(cfg: NSAConfig, seq_len: int) -> float:
    """Mean keys that one query of a sequence attends to, all three branches together.

    Counts visible compressed keys, tokens of the selected blocks up to the query, and the window.
    Exact for a causal sequence of `seq_len` tokens. At 2,048 with the production shape: 1,263.
    """
    total = 0
    for t in range(seq_len):
        compressed = cfg.n_compressed(t + 1)
        blocks_before = min(t // cfg.l_sel, cfg.n_sel - 1)
        selected = blocks_before * cfg.l_sel + t % cfg.l_sel + 1
        total += compressed + selected + min(cfg.w, t + 1)
    return total / seq_len


def parameter_count(cfg: ModelConfig) -> int:
    """Distinct parameters of the language model, from its config."""
    a = cfg.attention
    attention = a.dim * a.n_heads * (a.d_k + a.d_v) + a.dim * 3 * a.n_kv_groups * (a.d_k + a.d_v)
    attention += (a.dim + 1) * a.n_heads * 3
    if a.phi == "mlp":
        for width in (a.d_k, a.d_v):
            attention += a.l * width + (a.l * width + 1) * 2 * width + 2 * width * width
    layer = attention + 3 * a.dim * cfg.mlp_hidden + 2 * a.dim
    embeddings = cfg.vocab_size * a.dim * (1 if cfg.tie_embeddings else 2)
    return cfg.n_layers * layer + a.dim + embeddings


def model_flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """FLOPs that training needs per token: 6 x parameters + 3 x attention forward.

    Recomputation, optimizer and communication are not counted: this is the model's need, not the
    machine's work.
    """
    a = cfg.attention
    # Forward, of one layer's scores and weighted sums; the projections count as parameters.
    layer = 2.0 * a.n_heads * (a.d_k + a.d_v) * keys_touched(a, seq_len)
    return 6.0 * parameter_count(cfg) + 3.0 * (cfg.n_layers * layer)
