"""What real machines left, by device and driver; each folder says what was changed."""

from __future__ import annotations

from pathlib import Path

H100 = Path(__file__).parent / "h100_80gb_hbm3-580.159.04"
H200 = Path(__file__).parent / "h200-580.159.04"
