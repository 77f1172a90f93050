"""The compressed branch in pieces: the sums over all queries are the same, however they are cut."""

from __future__ import annotations

import pytest
import torch

from nsa.attention import compressed


@pytest.mark.parametrize(
    ("n_rows", "pieces"),
    [(12_102, 6), (24_390, 30), (300, 1), (512, 2), (8_191, 1)],
)
def test_pieces_are_equal_and_not_short(n_rows: int, pieces: int) -> None:
    """6 query heads of 2,017 queries, a prime number, make no more than 6; 8,191 is prime."""
    assert compressed._pieces(n_rows, torch.device("cuda")) == pieces
    assert compressed._pieces(n_rows, torch.device("cpu")) == 1


@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_the_sum_over_rows_does_not_depend_on_the_pieces(
    monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Two chunks of rows, the second added to the first, against an explicit sum in float64."""
    monkeypatch.setattr(compressed, "_pieces", lambda *_: pieces)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 24, width, generator=generator, dtype=torch.float64) for width in (5, 4))
    first = compressed._add_product(None, a, b)
    both = compressed._add_product(first.clone(), a, 2 * b)
    right = (a[..., None] * b[:, :, None]).sum(1)
    torch.testing.assert_close(first, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(both, 3 * right, rtol=1e-12, atol=1e-12)
