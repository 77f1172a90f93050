"""What the tests of attention share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was compiled before; products and sums in one instruction, as ever.

    Triton 3.9 warns where the latter is left to its default, and here a warning is an error.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
