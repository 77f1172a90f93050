"""Every path equals the equations on small shapes: outputs, gradients and selected blocks.

The equations are those of `nsa.witness.self_test`, which share nothing with the paths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from nsa.attention import attend
from nsa.config import NSAConfig, Way
from nsa.tests import maths
from nsa.witness.self_test import Agreement, Bound, measure

# float64 pins the algorithm; float32 pins the path that training runs.
EXACT, TYPES = Bound(whole=1e-12, row=1e-12, scores=1e-12), (torch.float64, torch.float32)
BATCHED = Way(path="batched")
# Of a long sequence: over 600 compressed keys and 300 blocks.
LONG = 2565


def held(
    seq_len: int, dtype: torch.dtype, way: Way, given: NSAConfig | None = None, **shape: Any
) -> Agreement:
    """How far a path is off; given: the path runs another config than the equations."""
    cfg = NSAConfig(**{**maths.SMALL, **shape})
    run = partial(attend, cfg=given or cfg, way=way)
    found = measure(run, cfg, seq_len, dtype=dtype, device=maths.device())
    return replace(found, bound=EXACT) if dtype == torch.float64 else found


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seq_len", (1, 7, 8, 33, 61))
@pytest.mark.parametrize("path", ("sequential", "batched"))
def test_path_equals_the_equations(path: str, seq_len: int, dtype: torch.dtype) -> None:
    assert held(seq_len, dtype, Way(path=path)).problems == []


def test_a_long_sequence_equals_the_equations() -> None:
    """What numbers its blocks and compressed keys needs more than a byte."""
    assert held(LONG, torch.float32, Way(), n_heads=4).problems == []


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("seq_len", "masks"), [(33, False), (61, False), (61, True)])
def test_work_in_small_pieces_equals_the_equations(
    monkeypatch: pytest.MonkeyPatch, seq_len: int, masks: bool, dtype: torch.dtype
) -> None:
    """Pieces are cut by sizes that only long sequences reach; here they are a few tokens.

    masks: by kernels that keep a mask for the backward pass, where each piece's is made again.
    They ask for keys and values of one width.
    """
    maths.cut_small(monkeypatch)
    width = {"d_v": maths.SMALL["d_k"]} if masks else {}
    assert held(seq_len, dtype, replace(BATCHED, force_sdpa=masks), **width).problems == []


def test_the_bound_is_tight_enough_to_see_one_wrong_key() -> None:
    """Made to fail on purpose: a window one token too long."""
    wrong = NSAConfig(**{**maths.SMALL, "w": maths.SMALL["w"] + 1})
    assert held(40, torch.float32, BATCHED, wrong).problems
