"""The NumPy model by itself: what it refuses, and how it judges a choice of blocks."""

from __future__ import annotations

import numpy as np
import pytest

import nsa
from nsa.contract import NSAError
from nsa.layer import NSAAttention
from nsa.witness import oracle


def parts(layer: NSAAttention) -> dict[str, oracle.Array]:
    return {n: p.detach().double().numpy() for n, p in layer.state_dict().items()}


def test_narrow_weights_are_refused() -> None:
    """One line for each: the answer would only look like float64."""
    layer = NSAAttention(nsa.NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4))
    narrow = {n: p.astype(np.float32) for n, p in parts(layer).items()}
    with pytest.raises(NSAError, match=r"3 problem\(s\)") as error:
        oracle.attention(layer.cfg, narrow, np.zeros((1, 5, 8)))
    assert "in_proj.weight: float32, must be float64" in str(error.value)


# Position 59 of blocks of 10 sees blocks 0 to 5; forced are 0, 4 and 5, two more are free.
SMALL = nsa.NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, l=10, d=5, l_sel=10, n_sel=5)
SCORES = np.array([9.0, 2.0, 1.0, 3.0, 0.0, 0.0])


def judged(*blocks: int, scores: np.ndarray = SCORES) -> oracle.Selection:
    empty = np.zeros((1, 1, 2, 3))
    found = oracle.Attended(
        positions=np.array([59]),
        out=empty,
        branches={},
        gates=empty,
        scores=scores[None, None, None],
        chosen=np.zeros((1, 1, 1, 6), dtype=bool),
    )
    return oracle.judge_selection(SMALL, found, np.array(blocks)[None, None, None])


@pytest.mark.parametrize(
    ("blocks", "illegal", "differing", "shortfall"),
    [
        ((0, 1, 3, 4, 5), 0, 0, -1.0),
        ((5, 3, 0, 4, 1), 0, 0, -1.0),
        ((0, 2, 3, 4, 5), 0, 1, 1.0),
        ((0, 1, 2, 4, 5), 0, 1, 2.0),
        ((0, 1, 3, 5, 2), 1, 0, -np.inf),
        ((1, 2, 3, 4, 5), 1, 0, -np.inf),
        ((0, 1, 4, 5, 6), 1, 0, -np.inf),
        ((0, 1, 4, 5, -1), 1, 0, -np.inf),
        ((0, 1, 4, 5, 5), 1, 0, -np.inf),
    ],
    ids=["best", "order", "worse", "worst", "local", "initial", "ahead", "few", "twice"],
)
def test_a_selection_is_judged(
    blocks: tuple[int, ...], illegal: int, differing: int, shortfall: float
) -> None:
    found = judged(*blocks)
    assert (found.illegal, found.differing, found.shortfall) == (illegal, differing, shortfall)


def test_a_tie_within_rounding_is_small() -> None:
    """The other block of a near tie differs, by as little as the scores do."""
    near = SCORES + np.array([0, 0, 1 - 1e-9, 0, 0, 0])
    found = judged(0, 2, 3, 4, 5, scores=near)
    assert found.differing == 1 and found.illegal == 0 and 0 < found.shortfall < 1e-8
