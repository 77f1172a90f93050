"""Validation of what a caller hands to the functional core: everything wrong in one message."""

from __future__ import annotations

from torch import Tensor, float16, float32, float64
from torch import bfloat16 as bf16

from nsa.config import PATHS, RANGES, NSAConfig, choice_error
from nsa.contract import raise_problems

DTYPES = (float64, float32, bf16, float16)


def _shape_error(name: str, tensor: Tensor, letters: str, expected: tuple[int, ...]) -> list[str]:
    if tuple(tensor.shape) == expected:
        return []
    return [f"{name} has shape {tuple(tensor.shape)}: must be {letters} = {expected}"]


def _kind_errors(named: dict[str, Tensor]) -> list[str]:
    q = named["q"]
    errors = []
    if q.dtype not in DTYPES:
        errors.append(f"q is {q.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    for name, tensor in named.items():
        if tensor.dtype != q.dtype:
            errors.append(f"{name} is {tensor.dtype} but q is {q.dtype}: cast them to one type")
        if tensor.device != q.device:
            errors.append(
                f"{name} is on {tensor.device} but q is on {q.device}: move them together"
            )
    return errors


def check_selection_inputs(q: Tensor, k_cmp: Tensor, cfg: NSAConfig) -> None:
    """Raise NSAError unless q [B,S,H,Dk] and k_cmp fit the config and each other."""
    errors = _query_errors(q, cfg)
    if not errors:
        batch, seq_len = q.shape[:2]
        length, letters = _compressed_length(cfg, seq_len)
        expected = (batch, length, cfg.n_kv_groups, cfg.d_k)
        errors = _shape_error("k_cmp", k_cmp, f"[B,{letters},G,Dk]", expected)
        errors += _kind_errors({"q": q, "k_cmp": k_cmp})
    raise_problems("select_blocks", errors)


def check_attention_inputs(
    named: dict[str, Tensor], cfg: NSAConfig, *, path: str, selection_ranges: str
) -> None:
    """Raise NSAError unless all eight tensors fit the config, each other and the path."""
    errors = choice_error("path", path, PATHS)
    errors += choice_error("selection_ranges", selection_ranges, RANGES)
    q = named["q"]
    shape_errors = _query_errors(q, cfg)
    if not shape_errors:
        batch, seq_len = q.shape[:2]
        length, letters = _compressed_length(cfg, seq_len)
        for branch in ("cmp", "sel", "win"):
            rows, row_letters = (length, letters) if branch == "cmp" else (seq_len, "S")
            for kind, width in (("k", cfg.d_k), ("v", cfg.d_v)):
                name = f"{kind}_{branch}"
                expected = (batch, rows, cfg.n_kv_groups, width)
                label = f"[B,{row_letters},G,D{kind}]"
                shape_errors += _shape_error(name, named[name], label, expected)
        expected = (batch, seq_len, cfg.n_heads, 3)
        shape_errors += _shape_error("gates", named["gates"], "[B,S,H,3]", expected)
    raise_problems("nsa_attention", errors + shape_errors + _kind_errors(named))


def _query_errors(q: Tensor, cfg: NSAConfig) -> list[str]:
    if q.dim() != 4 or tuple(q.shape[2:]) != (cfg.n_heads, cfg.d_k):
        want = f"[B,S,H,Dk] with H={cfg.n_heads}, Dk={cfg.d_k}"
        return [f"q has shape {tuple(q.shape)}: must be {want}"]
    if q.shape[0] < 1 or q.shape[1] < 1:
        return [f"q has shape {tuple(q.shape)}: batch and sequence must hold at least one element"]
    return []


def _compressed_length(cfg: NSAConfig, seq_len: int) -> tuple[int, str]:
    if cfg.phi == "avg":
        return seq_len, "S"
    return cfg.n_compressed(seq_len), "N"
