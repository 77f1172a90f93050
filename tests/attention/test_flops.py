"""The project's published FLOP figures, reproduced."""

from __future__ import annotations

import pytest

import nsa
from nsa.config import (
    ModelConfig,
    keys_touched,
    model_flops_per_token,
)

CFG = nsa.NSAConfig()
LARGE = ModelConfig(vocab_size=50_304, n_layers=12)
BYTES = ModelConfig(vocab_size=256, n_layers=12)
H200, A100 = 790e12, 312e12


def dense_keys(seq_len: int) -> float:
    """Mean keys of a query of dense causal attention."""
    return (seq_len + 1) / 2


def test_keys_touched_at_2048() -> None:
    assert round(keys_touched(CFG, 2048)) == 1263
    assert keys_touched(CFG, 2048) / dense_keys(2048) == pytest.approx(1.23, abs=0.005)


def test_keys_touched_by_counting() -> None:
    """A small case, token by token, from the definition."""
    cfg = nsa.NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=5)
    total = 0
    for t in range(30):
        total += sum(1 for i in range(30) if i * 2 + 3 <= t)
        blocks = sorted({0, t // 4, max(0, t // 4 - 1)} if t >= 12 else set(range(t // 4 + 1)))
        total += sum(1 for token in range(t + 1) if token // 4 in blocks)
        total += min(5, t + 1)
    assert keys_touched(cfg, 30) == pytest.approx(total / 30)


@pytest.mark.parametrize(
    ("peak", "seq_len", "large", "small"),
    [
        (H200, 2048, 376, 518),
        (H200, 8192, 356, 481),
        (H200, 65_536, 289, 367),
        (A100, 2048, 148, 205),
        (A100, 8192, 141, 190),
        (A100, 65_536, 114, 145),
    ],
)
def test_roofline(peak: float, seq_len: int, large: int, small: int) -> None:
    """Thousand tokens/s at 40 % MFU, of 116.8M and of 78.4M parameters."""
    for cfg, expected in ((LARGE, large), (BYTES, small)):
        flops = model_flops_per_token(cfg, seq_len)
        assert round(0.4 * peak / flops / 1e3) == expected


@pytest.mark.parametrize("wrong", [0, -1])
def test_nonsense_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"seq_len=.*at least 1"):
        keys_touched(CFG, wrong)
