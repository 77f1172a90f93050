"""The pure parts of the stage `step`: ratios, the next batch, and what a build cannot do."""

from __future__ import annotations

import pytest

from runbook.tools.acceptance.pairs import Batch, Variant, next_size, ratio, summary, table

BATCH = Batch(memory_share=0.85, grow=4, steps=20, largest=256)


def rows(*points: tuple[int, float]) -> list[dict[str, float]]:
    return [{"batch": size, "memory_mib": mib} for size, mib in points]


@pytest.mark.parametrize(
    ("points", "total_mib", "wanted"),
    [
        # 1,000 MiB and 2,000 per sequence: 85 % of 140,000 are 119,000, or 59 sequences.
        (((2, 5_000), (8, 17_000)), 140_000, 59),
        (((2, 5_000), (8, 17_000)), 1_000_000, 64),  # never more than eight times the last
        (((8, 17_000), (64, 129_000)), 140_000, None),  # beyond its share already
        (((2, 5_000), (8, 17_000)), 20_000, None),  # filled
        (((2, 5_000), (8, 5_000)), 140_000, None),  # a CPU's memory says nothing
        (((2, 5_000), (8, 17_000)), 0, None),
        (((32, 1_000), (128, 2_000)), 140_000, 256),
    ],
)
def test_the_batch_that_fills_memory(
    points: tuple[tuple[int, float], ...], total_mib: float, wanted: int | None
) -> None:
    assert next_size(rows(*points), BATCH, total_mib, 1) == wanted


def test_every_rank_gets_as_much() -> None:
    size = next_size(rows((2, 5_000), (8, 17_000)), BATCH, 140_000, 2)
    assert size is not None and size % 2 == 0


def test_a_ratio_with_its_bounds() -> None:
    found = ratio([100.0, 110.0, 90.0], [120.0, 132.0, 108.0])
    assert found["ratio"] == pytest.approx(1.2)
    low, high = found["interval"]
    assert low == pytest.approx(1.2) and high == pytest.approx(1.2)
    noisy = ratio([100.0, 110.0, 90.0], [130.0, 100.0, 115.0])
    assert noisy["interval"][0] < noisy["ratio"] < noisy["interval"][1]
    few = ratio([100.0], [120.0])
    assert few["interval"] is None


def test_a_toggle_that_this_build_does_not_know() -> None:
    variant = Variant(name="new", set={"NSA_NO_SUCH": "1"}, against={"NSA_NO_SUCH": "0"})
    assert variant.unknown == ["no toggle NSA_NO_SUCH in this build"]
    lacking = Variant(
        name="x", set={"NSA_OPT_FUSED": "1"}, against={"NSA_OPT_FUSED": "0"}, package="no_such"
    )
    assert lacking.unknown == ["no package no_such here"]
    wrong = Variant(
        name="wrong", set={"NSA_DDP_COMPRESS": "zip"}, against={"NSA_DDP_COMPRESS": "off"}
    )
    assert "allowed is off, bf16, fp16" in wrong.unknown[0]


def test_what_does_not_change_inside_a_launch_is_launched() -> None:
    inside = Variant(name="a", set={"NSA_OPT_FUSED": "1"}, against={"NSA_OPT_FUSED": "0"})
    outside = Variant(
        name="b", set={"NSA_DDP_DISABLE_GC": "1"}, against={"NSA_DDP_DISABLE_GC": "0"}
    )
    assert inside.in_launch and not outside.in_launch


def test_the_tables() -> None:
    pairs = [
        {"variant": "a", "set": "X=1", "against": "X=0", "how": "turns", "says": "faster"}
        | {"ratio": 1.2, "interval": [1.1, 1.3]},
        {"variant": "b", "set": "Y=1", "against": "Y=0", "problem": "crashed: why"},
    ]
    batches = [
        {"batch": 2, "toks_per_s": 1000.0, "step_s": 0.1, "mfu": 0.12, "memory_mib": 5000.0}
        | {"accumulation": 2},
        {"batch": 8, "problem": "out_of_memory: it is"},
    ]
    text = table(pairs, batches)
    assert "| a | X=1 | X=0 | 1.200 | 1.100 to 1.300 | turns: faster |" in text
    assert "crashed: why" in text and "12.00%" in text and "2 micro-batches" in text
    assert summary(pairs, batches) == (
        "speed ratios: a 1.200; best batch 2: 1000 tok/s, 12.00% MFU; b: crashed: why"
    )
