"""An arm that cannot run is refused in words that say why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.toggles import parse_toggles
from nsa.train.arms import Block
from nsa.train.loop import Loop


def refusal(error: RuntimeError) -> str | None:
    """What the loop says of an arm whose trial step raises this."""

    def probe(_batch: Any) -> None:
        raise error

    loop = object.__new__(Loop)
    loop.engine = SimpleNamespace(probe=probe)  # type: ignore[assignment]
    loop._early = SimpleNamespace()  # type: ignore[assignment]
    toggles = parse_toggles({"NSA_SDPA_NO_FLASH": "1"})
    return loop._probe(Block(index=0, arm="a", warmup_steps=0, steps=1, toggles=toggles))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"),
         "out of memory: CUDA out of memory. Tried 2 GiB"),
        (RuntimeError("No available kernel."), "No available kernel."),
    ],
)  # fmt: skip
def test_an_arm_without_memory_is_told_from_one_without_a_kernel(
    error: RuntimeError, said: str
) -> None:
    assert refusal(error) == said
