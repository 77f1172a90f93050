"""Work of a few tokens in several pieces, as only long sequences are cut."""

from __future__ import annotations

import pytest

from nsa.attention import branches
from nsa.attention.cpu import blocks, dense

# Queries of a block; bytes of partial results, of scores, and of a chunk's rows. Partial results of
# float32 go over two blocks at once, so that queries behind a block are among its pieces.
_SIZES = {
    (blocks, "SPLIT"): 3,
    (dense, "PARTIAL_BYTES"): 1 << 13,
    (dense, "PIECE_BYTES"): 1 << 10,
    (branches, "CHUNK_BYTES"): 1 << 11,
}


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, whatever cuts work into pieces makes them small."""
    for (module, name), size in _SIZES.items():
        assert getattr(module, name) > size
        monkeypatch.setattr(module, name, size)
