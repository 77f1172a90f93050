"""What gates.csv shows is held against the gates of steps that were computed twice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from nsa.contract.digests import recomputed_steps
from runbook.accounts.model import gates_account, selection_account
from tests.accounts.launches import STEPS, WORK, Ranks, ending_of, honest

TWICE = recomputed_steps("t", 1, STEPS)
# Of twelve layers the one that has collapsed: entropy, largest share, shares.
USED, COLLAPSED = [0.95, 0.4, 0.4, 0.35, 0.25], [0.05, 0.98, 0.98, 0.01, 0.01]
LAYERS = [USED] * 11 + [COLLAPSED]
MEANS = [(11 * one + other) / 12 for one, other in zip(USED, COLLAPSED, strict=True)]
OVER_LAYERS = ("entropy_mean", "max_gate_mean", "share_cmp", "share_sel", "share_win")


def table(**changed: Any) -> pd.DataFrame:
    """Readings of every step; their last digits differ."""
    steps = pd.Series(range(1, STEPS + 1))
    values = dict(zip(OVER_LAYERS, MEANS, strict=True))
    columns = {"step": steps, "entropy": 0.05 + 1e-9 * steps, "max_gate": 0.98, **values}
    return pd.DataFrame({**columns, **changed})


def again(**told: Any) -> Ranks:
    """Rank 0 tells the same layers of every step that it computed twice."""
    found = {"steps": list(TWICE), "gates": [LAYERS] * len(TWICE), **told}
    return ending_of(honest()[1], 0, recomputed=found)


def problems(gates: pd.DataFrame | None, ranks: Ranks | None = None) -> list[str]:
    return gates_account(gates, ranks or again(), WORK)


def test_readings_that_were_taken_balance() -> None:
    assert problems(table()) == []
    assert problems(None) == problems(table().iloc[:0]) == []
    empty = dict.fromkeys(("share_cmp", "share_sel", "share_win"), math.nan)
    assert problems(table(**empty)) == []


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        # A mean over the layers hides the one that has collapsed.
        ({"entropy": (11 * 0.95 + 0.05) / 12}, "entropy of the gates in step 1 is 0.87500 in"),
        ({"max_gate": (11 * 0.4 + 0.98) / 12}, "max_gate of the gates in step 1 is 0.44833 in"),
        ({"share_cmp": MEANS[3], "share_sel": MEANS[2]}, "share_cmp of the gates in step 1 is 0.3"),
        ({"share_win": MEANS[4] + 2e-4}, "share_win of the gates"),
        # And the worst layer in the place of the mean would halt a run for it.
        ({"entropy_mean": 0.05}, "entropy_mean of the gates in step 1 is 0.05000 in"),
        ({"max_gate_mean": 0.98}, "max_gate_mean of the gates in step 1 is 0.98000 in"),
        ({"entropy_mean": math.nan}, "entropy_mean of the gates in step 1 is nan"),
        ({"entropy": math.nan}, "entropy of the gates in step 1 is nan"),
    ],
)
def test_another_statistic_than_that_of_the_gates_is_seen(
    changed: dict[str, Any], wanted: str
) -> None:
    found = problems(table(**changed))
    assert any(text.startswith(wanted) for text in found), found


def test_a_reading_that_is_wrong_in_one_step_alone_is_seen() -> None:
    entropy = table()["entropy"].where(table()["step"] != TWICE[-1], 0.5)
    (text,) = problems(table(entropy=entropy))
    assert text.startswith(f"entropy of the gates in step {TWICE[-1]} is 0.5")


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (again(gates=None), "the gates of no step were computed a second time"),
        (again(gates=[LAYERS]), "the gates of no step were computed a second time"),
        (again(gates=[LAYERS[:2]] * len(TWICE)), "step 1 tells the gates of 2 layers"),
        (again(gates=[[[0.5]] * 12] * len(TWICE)), "step 1 tells the gates of 12 layers"),
        (again(steps=[99], gates=[LAYERS]), "no reading of the gates is of a step that was"),
    ],
)
def test_a_second_source_that_lacks_is_seen(ranks: Ranks, wanted: str) -> None:
    assert problems(table(), ranks)[0].startswith(wanted)


@pytest.mark.parametrize(
    ("entropy", "gate", "stuck"),
    [
        ([0.05] * 3, [0.98] * 3, True),
        ([0.05] * 2, [0.98] * 2, False),
        ([0.05] * 3, [0.98, 0.98, 0.98001], False),
        ([0.05, 0.05, 0.05001], [0.98] * 3, False),
    ],
)
def test_three_readings_that_are_equal_in_all_digits_were_not_taken(
    entropy: list[float], gate: list[float], stuck: bool
) -> None:
    taken = table().iloc[: len(entropy)].assign(entropy=entropy, max_gate=gate)
    equal = f"{len(entropy)} readings of the gates are equal in every digit"
    assert problems(taken) == ([equal] if stuck else [])


def selecting(blocks: float, share: float) -> pd.DataFrame:
    """Readings of the selection in every step."""
    return table(sel_blocks_mean=blocks, sel_forced_share=share)


def of_shape(l_sel: Any, n_sel: Any, seq_len: int = 128) -> Any:
    return replace(WORK, seq_len=seq_len, shape={"l_sel": l_sel, "n_sel": n_sel})


# The last block of a sequence may be cut off, and a sequence be shorter than what is chosen.
@pytest.mark.parametrize("seq_len", [1, 16, 100, 128, 2048])
@pytest.mark.parametrize(("l_sel", "n_sel"), [(16, 4), (64, 16), (7, 3)])
def test_a_selection_is_that_of_the_config_in_every_reading(
    seq_len: int, l_sel: int, n_sel: int
) -> None:
    """Counted query by query."""
    seen = [len(range(0, query + 1, l_sel)) for query in range(seq_len)]
    read = sum(min(blocks, n_sel) for blocks in seen)
    share = sum(min(blocks, 3) for blocks in seen) / read
    work = of_shape(l_sel, n_sel, seq_len)
    assert selection_account(selecting(read / seq_len, share), work) == []
    (text,) = selection_account(selecting(read / seq_len + 1e-4, share), work)
    assert text.startswith("from step 1 a query attends to ") and f"n_sel={n_sel}" in text
    late = selecting(read / seq_len, share)
    late.loc[STEPS - 1, "sel_forced_share"] = share - 1e-4
    (text,) = selection_account(late, work)
    assert text.startswith(f"from step {STEPS} ") and "of its blocks are forced" in text


def test_a_selection_that_nobody_tells_of_is_held_against_nothing() -> None:
    """Earlier records have no such column, statistics may be off, and configs be another's."""
    work = of_shape(16, 4)
    assert selection_account(None, work) == selection_account(table(), work) == []
    assert selection_account(selecting(math.nan, math.nan), work) == []
    for other in (WORK, of_shape(0, 4), of_shape(16, "many"), of_shape(16, -1)):
        assert selection_account(selecting(1.0, 1.0), other) == []
