"""Somebody else's kernel beside ours in benchmarks.attention_gpu, by stand-ins on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import attention_gpu
from benchmarks.attention.checks import load_peer
from nsa.attention import nsa_attention
from nsa.attention.triton.tiles import shape_problem


def off_by_a_tenth(**given: object) -> Tensor:
    """Attention that is wrong."""
    out: Tensor = nsa_attention(**given) * 1.1  # type: ignore[arg-type]
    return out


def of_another_shape(**given: object) -> Tensor:
    return torch.zeros(1, 2)


def test_peers_are_held_against_the_reference_timed_and_never_decide() -> None:
    right = "peer nsa.attention:nsa_attention"
    here = f"{__name__}:off_by_a_tenth"
    peers = {
        right: load_peer("nsa.attention:nsa_attention"),
        "peer wrong": off_by_a_tenth,
        "peer shape": of_another_shape,
    }
    assert load_peer(here)(**given_once()).shape == (1, 70, 12, 64)
    rows = {row["arm"]: row for row in attention_gpu.measure(70, "cpu", 1, 64, peers)}
    assert set(rows) == {"nsa", *peers, "dense"}
    assert rows[right]["right"] and rows[right]["total_ms"] > 0
    assert not rows["peer wrong"]["right"] and rows["peer wrong"]["error"] > 0.05
    assert "has shape (1, 2), not (1, 70, 12, 64)" in rows["peer shape"]["problem"]
    assert not any(attention_gpu.is_wrong(row) for row in rows.values())
    assert "WRONG" in attention_gpu.table(list(rows.values()))


def test_a_shape_is_heads_groups_and_width() -> None:
    """What public kernels are timed at, beside the production's; each row says which it is."""
    rows = attention_gpu.measure(70, "cpu", 1, 64, {}, "32/2/128")
    assert {row["shape"] for row in rows} == {"32/2/128"}
    assert all(row["right"] for row in rows), rows
    assert "70 of 32/2/128: " in attention_gpu.summary(rows)
    cfg = attention_gpu.config_of("64/4/128")
    assert (cfg.n_heads, cfg.n_kv_groups, cfg.d_k, cfg.d_v) == (64, 4, 128, 128)
    assert shape_problem(cfg, 65_536) is None


def given_once() -> dict[str, object]:
    from benchmarks.attention.checks import CFG, inputs

    return {**inputs(70, torch.float32, "cpu"), "cfg": CFG}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no_such_module:attend", "No module named 'no_such_module'"),
        ("nsa.attention:no_such", "has no attribute 'no_such'"),
        ("nsa.attention", "give module:callable"),
        ("nsa.attention:__name__", "str is not callable"),
        (":attend", "give module:callable"),
    ],
)
def test_what_is_no_peer_is_said_before_anything_runs(text: str, why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        attention_gpu.main(["--out", "unused", "--device", "cpu", "--peer", text])
