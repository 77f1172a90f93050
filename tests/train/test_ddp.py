"""What the compression hook counts."""

from __future__ import annotations

import torch

from nsa.train.ddp import WireStats


def test_wire_statistics_start_again_after_each_reading() -> None:
    stats = WireStats(wire_dtype=torch.bfloat16, world_size=2)
    stats.bytes_before, stats.bytes_after = 8, 4
    assert stats.take()["bytes_before"] == 8
    assert stats.take()["bytes_before"] == 0
