"""Vectorized selection ranges (v2) equal the plain loops (v1): indices, outputs, gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from nsa.attention import attend_selected
from nsa.attention.selection import group_queries, ranges_v1, ranges_v2
from nsa.config import NSAConfig
from nsa.tests import maths
from nsa.toggles import parse_toggles

SHAPE = {**maths.SMALL, "n_sel": 5}
CFG = NSAConfig(**SHAPE)
SEQ_LEN, BATCH, GROUPS = 97, 2, 2

# Blocks of a query whose own is `now`, with a generator of random numbers.
PATTERNS: dict[str, Callable[[int, torch.Generator], list[int]]] = {
    # Any visible ones, in any order.
    "random": lambda now, by: torch.randperm(now + 1, generator=by)[: CFG.n_sel].tolist(),
    # Every other one: nothing merges, each is a range of its own.
    "gaps": lambda now, _: list(range(now % 2, now + 1, 2))[-CFG.n_sel :],
    # Neighbors: everything merges into one range.
    "adjacent": lambda now, _: list(range(max(0, now + 1 - CFG.n_sel), now + 1)),
    "forced": lambda now, _: sorted({0, max(0, now - 1), now}),
    "single": lambda now, _: [now],
    "none": lambda *_: [],
    "repeats": lambda now, _: [0, now, 0, now],
    # What begins after the query must disappear.
    "future": lambda now, _: [now, now + 1, now + 3],
    # Padding between the blocks instead of after them.
    "holes": lambda now, _: [0, -1, now, -1],
}


def _places(times: Iterable[int]) -> Tensor:
    return torch.tensor(list(times), device=maths.device())


def _blocks(pattern: str, positions: Tensor) -> Tensor:
    """Block indices [BATCH, S, GROUPS, n_sel] of a pattern at positions [S]."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(BATCH):
        for t in positions.tolist():
            for _ in range(GROUPS):
                chosen = PATTERNS[pattern](t // CFG.l_sel, generator)
                rows.append(chosen + [-1] * (CFG.n_sel - len(chosen)))
    table = torch.tensor(rows, device=maths.device())
    return table.view(BATCH, len(positions), GROUPS, CFG.n_sel)


def _tokens(ranges: Tensor) -> list[set[int]]:
    """The set of tokens of each row of ranges [..., n, 2]."""
    rows = ranges.flatten(0, -3).tolist()
    return [{i for first, last in row for i in range(first, last)} for row in rows]


def _expected(blocks: Tensor, positions: Tensor) -> list[set[int]]:
    """The same from the definition: tokens of the blocks, up to the query."""
    size, found = CFG.l_sel, []
    for element in blocks.tolist():
        for t, groups in zip(positions.tolist(), element, strict=True):
            for row in groups:
                tokens = {i for j in row if j >= 0 for i in range(j * size, (j + 1) * size)}
                found.append({i for i in tokens if i <= t})
    return found


def _check_indices(pattern: str, positions: Tensor) -> None:
    blocks = _blocks(pattern, positions)
    one, two = ranges_v1(blocks, CFG, positions), ranges_v2(blocks, CFG, positions)
    assert torch.equal(one, two), f"{pattern}: v1 and v2 give different ranges"
    assert _tokens(two) == _expected(blocks, positions), f"{pattern}: not the blocks' tokens"


def _attend_ranges(x: maths.Inputs, ranges: Tensor, positions: Tensor) -> list[Tensor]:
    """Output and gradients of attention on the tokens that the ranges name."""
    parts = []
    for place, t in enumerate(positions.tolist()):
        q = group_queries(x["q"][:, t : t + 1], CFG)
        here = ranges[:, place : place + 1]
        k, v = (x[name][:, : t + 1].transpose(1, 2) for name in ("k_sel", "v_sel"))
        parts.append(attend_selected(q, k, v, here, CFG))
    out = torch.cat(parts, 2)
    return [out, *torch.autograd.grad(out.square().sum(), [x["q"], x["k_sel"], x["v_sel"]])]


def _check_attention_on(pattern: str, positions: Tensor) -> None:
    x = maths.random_inputs(SHAPE, BATCH, SEQ_LEN, seed=11, dtype=torch.float64)
    blocks = _blocks(pattern, positions)
    one = _attend_ranges(x, ranges_v1(blocks, CFG, positions), positions)
    two = _attend_ranges(x, ranges_v2(blocks, CFG, positions), positions)
    for name, a, b in zip(("output", "dq", "dk", "dv"), one, two, strict=True):
        assert float(a.detach().abs().sum()) > 0, f"{pattern}: {name} is empty"
        assert torch.equal(a, b), (
            f"{pattern}: {name} differs by {float((a - b).detach().abs().max()):.1e}"
        )


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_equivalence_various_patterns(pattern: str) -> None:
    """Equal ranges, and exactly equal outputs and gradients, for whatever is selected."""
    places: list[tuple[Iterable[int], Iterable[int]]] = [
        (range(SEQ_LEN), (0, 7, 8, 40, 41, 63, 64, 96))
    ]
    if parse_toggles(os.environ).flag("NSA_TEST_SEL_PACK"):
        # Rows of several places packed together, as one step of many decodings has them.
        packed = (5, 5, 96, 0, 64, 63, 12, 95)
        places.append((packed, packed))
    for every, some in places:
        _check_indices(pattern, _places(every))
        if pattern != "none":
            _check_attention_on(pattern, _places(some))


def test_a_difference_would_be_seen() -> None:
    """Made to fail on purpose: one token more in one range is another set."""
    positions = _places(range(SEQ_LEN))
    blocks = _blocks("gaps", positions)
    wrong = ranges_v2(blocks, CFG, positions).clone()
    wrong[1, -1, 0, 0, 1] += 1
    assert _tokens(wrong) != _expected(blocks, positions)
    assert not torch.equal(wrong, ranges_v1(blocks, CFG, positions))
