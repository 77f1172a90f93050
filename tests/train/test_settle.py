"""Why a run ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nsa.train.settle import halt_reason, what_is_not_finite
from nsa.train.step_sync import Agreed


def test_the_halt_files_first_line_is_the_reason(tmp_path: Path) -> None:
    path = tmp_path / ".HALT"
    assert halt_reason(path) == ".HALT"
    path.write_text("heartbeat stall\nmore\n")
    assert halt_reason(path) == ".HALT (heartbeat stall)"


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [
        (5.545177936553955, float("nan"), "gradient norm nan, while the loss is 5.545"),
        (float("inf"), 0.25, "loss inf on rank 1, while the gradient norm is 0.25"),
        (float("nan"), float("nan"), "loss nan on rank 1, gradient norm nan"),
    ],
)
def test_what_is_not_finite_comes_first(loss: float, norm: float, said: str) -> None:
    where = "" if math.isfinite(loss) else "rank 1"
    agreed = Agreed(
        loss=loss,
        grad_norm=norm,
        where=where,
        nonfinite=True,
        halt=False,
        terminate=False,
        saved=False,
    )
    assert what_is_not_finite(agreed) == said
