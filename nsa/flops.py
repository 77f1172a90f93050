"""Model FLOPs, in one place: 6 x parameters + 3 x attention forward, per token. Torch-free."""

from __future__ import annotations

from nsa.config import ModelConfig, NSAConfig
from nsa.contract import NSAError

FORMULA = "model FLOPs per token = 6 x parameters + 3 x attention forward"


def keys_touched(cfg: NSAConfig, seq_len: int) -> float:
    """Mean keys that one query of a sequence attends to, all three branches together.

    Counts visible compressed keys, tokens of the selected blocks up to the query, and the window.
    Exact for a causal sequence of `seq_len` tokens. At 2,048 with the production shape: 1,263.
    """
    if seq_len < 1:
        raise NSAError(f"seq_len={seq_len}: must be at least 1")
    total = 0
    for t in range(seq_len):
        compressed = cfg.n_compressed(t + 1)
        blocks_before = min(t // cfg.l_sel, cfg.n_sel - 1)
        selected = blocks_before * cfg.l_sel + t % cfg.l_sel + 1
        total += compressed + selected + min(cfg.w, t + 1)
    return total / seq_len


def dense_keys_touched(seq_len: int) -> float:
    """Mean keys per query of dense causal attention."""
    return (seq_len + 1) / 2


def attention_flops_per_token(cfg: NSAConfig, seq_len: int) -> float:
    """Forward FLOPs per token of one layer's scores and weighted sums (projections excluded)."""
    return 2.0 * cfg.n_heads * (cfg.d_k + cfg.d_v) * keys_touched(cfg, seq_len)


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
    attention = cfg.n_layers * attention_flops_per_token(cfg.attention, seq_len)
    return 6.0 * parameter_count(cfg) + 3.0 * attention


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation, a share of 1: tok/s x FLOPs per token / peak of all devices."""
    if peak_flops_per_s <= 0:
        raise NSAError(f"peak_flops_per_s={peak_flops_per_s!r}: must be above 0")
    return tokens_per_s * flops_per_token / peak_flops_per_s


def roofline_tokens_per_s(
    flops_per_token: float, peak_flops_per_s: float, utilisation: float = 0.4
) -> float:
    """Tokens/s at a given utilisation of the peak."""
    return utilisation * peak_flops_per_s / flops_per_token
