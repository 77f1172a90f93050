"""What phases keep for the pictures: the values behind the decision and its own interval."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import geometric_mean

import numpy as np
import pandas as pd
import pytest

from runbook.config.phase import Judgement, PlanContext
from runbook.records import Comparison, Mark, Measurement, Series
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder
from tests.phases.answers import WHERE
from tests.phases.test_single_gpu import scaled_evidence

AA = builder.context(aa=True)
CPU = builder.context("cpu")


def uneven(made: LaunchEvidence) -> LaunchEvidence:
    """Arms that differ, and rounds too: by a percent, in a pattern of its own for each arm."""
    frame = made.training.frame.copy()
    arms = {arm: place for place, arm in enumerate(sorted(set(frame["arm"])))}
    slower = [
        1 + 0.01 * arms[arm] + 0.01 * ((block * (arms[arm] + 2)) % 3)
        for arm, block in zip(frame["arm"], frame["block"], strict=True)
    ]
    frame["dt_s"] *= slower
    frame["toks_per_s"] = frame["tokens"] / frame["dt_s"]
    frame["loss"] += [
        0.001 * (block % 3) * arms[a] for a, block in zip(frame["arm"], frame["block"], strict=True)
    ]
    return replace(made, training=replace(made.training, frame=frame))


def judged(phase: str, where: PlanContext = WHERE) -> tuple[Judgement, dict[str, LaunchEvidence]]:
    change = uneven if phase in ("bucket_sweep", "fused_adamw") else None
    found = builder.evidence(phase, where, change=change)
    return builder.judge(phase, found, where), dict(found.launches)


def csv(launch: LaunchEvidence) -> pd.DataFrame:
    return launch.training.frame


def compared(judgement: Judgement, check: str) -> Comparison:
    (one,) = (one for one in judgement.comparisons if one.check == check)
    return one


def measured(judgement: Judgement, check: str) -> Measurement:
    (one,) = (one for one in judgement.checks if one.id == check)
    return one.measurement


def by_hand(launch: LaunchEvidence, column: str = "tokens") -> dict[tuple[str, int], float]:
    """Tokens over time (or the mean loss) of every arm and block, added up row by row."""
    sums: dict[tuple[str, int], list[float]] = {}
    for row in csv(launch).to_dict("records"):
        if not row["warmup"]:
            kept = sums.setdefault((str(row["arm"]), int(row["block"])), [0.0, 0.0])
            kept[0] += row[column]
            kept[1] += row["dt_s"] if column == "tokens" else 1.0
    return {key: total / over for key, (total, over) in sums.items()}


@pytest.mark.parametrize(
    ("phase", "check", "where"),
    [
        ("bucket_sweep", "bucket_sweep.best", WHERE),
        ("bucket_sweep", "bucket_sweep.best", AA),
        ("fused_adamw", "fused_adamw.keep", WHERE),
        ("fused_adamw", "fused_adamw.keep", AA),
        ("fused_adamw", "fused_adamw.keep", CPU),
    ],
)
def test_the_rounds_of_arms_are_kept_with_the_interval_that_decided(
    phase: str, check: str, where: PlanContext
) -> None:
    judgement, launches = judged(phase, where)
    shown, decided = compared(judgement, check), measured(judgement, check)
    assert shown.rows[0].measurement == decided
    rates = by_hand(launches["interleaved"])
    for row in shown.rows:
        above, below = (words.removesuffix(" MB") for words in row.label.split(" against "))
        rounds = range(decided.n)
        ratios = [rates[above, block] / rates[below, block] for block in rounds]
        assert row.values == pytest.approx(ratios)
        assert row.measurement.value == pytest.approx(geometric_mean(ratios))
        low, high = row.measurement.interval or (math.nan, math.nan)
        assert low < float(row.measurement.value) < high
    arms = {arm for arm, _ in rates}
    assert len(shown.rows) == len(arms) - 1
    assert shown.answer
    # Where nothing is gated the picture says so in the words of the row.
    assert shown.answer in next(one.reason for one in judgement.checks if one.id == check)


def test_pairs_of_launches_are_kept_with_what_decides_first() -> None:
    found = scaled_evidence(1e5, 1.96e5)
    judgement = builder.judge("single_gpu", found, WHERE)
    shown = compared(judgement, "single_gpu.scaling")
    weak, strong = shown.rows
    assert weak.decides
    assert not strong.decides
    assert weak.measurement == measured(judgement, "single_gpu.scaling")
    assert strong.measurement == measured(judgement, "single_gpu.scaling_global_batch")
    assert weak.values == pytest.approx((0.98,) * weak.measurement.n, rel=0.01)
    assert strong.values == pytest.approx((0.49,) * strong.measurement.n, rel=0.01)
    assert shown.limits == (Mark(label="floor", value=0.9),)


def test_drift_and_projected_memory_are_kept_for_every_rank() -> None:
    judgement, _ = judged("long_run")
    drift = compared(judgement, "long_run.steady")
    assert drift.rows[0].measurement.interval == measured(judgement, drift.check).interval
    assert (drift.margin.low, drift.margin.high) == (-0.03, 0.03)
    memory = compared(judgement, "long_run.memory_plateau")
    assert [row.label for row in memory.rows] == ["rank 0", "rank 1"]
    assert measured(judgement, memory.check) in [row.measurement for row in memory.rows]
    assert [mark.value for mark in memory.limits] == [60 * 1024]


def groups(judgement: Judgement) -> dict[str, list[Series]]:
    kept: dict[str, list[Series]] = {}
    for curve in judgement.series:
        kept.setdefault(curve.group, []).append(curve)
    return kept


@pytest.mark.parametrize("phase", ["baseline", "single_gpu", "long_run"])
def test_throughput_is_kept_with_its_warmup_and_its_last_50_steps(phase: str) -> None:
    judgement, launches = judged(phase)
    curves = groups(judgement)["throughput"]
    assert sorted(curve.label for curve in curves) == sorted(launches)
    for curve in curves:
        (last,) = (
            one for one in judgement.measurements
            if one.path == curve.path and one.name == "toks_per_s_last50"
        )  # fmt: skip
        assert curve.window == last.window
        assert curve.warmup.first_step == 1
        frame = csv(launches[curve.label])
        assert curve.n == len(frame)
        held = dict(zip(frame["step"], frame["toks_per_s"], strict=True))
        assert [y for _, y in curve.points] == pytest.approx([held[x] for x, _ in curve.points])
        assert max(y for _, y in curve.points) == pytest.approx(frame["toks_per_s"].max())


def test_loss_memory_and_gates_of_the_long_run_have_their_limits() -> None:
    judgement, launches = judged("long_run")
    kept = groups(judgement)
    effective = (launches["run"].env or {})["effective"]
    start, floor = math.log(effective["vocab_size"]), effective["loss_floor"]
    share = next(one.limit for one in judgement.checks if one.id == "long_run.learns")
    assert isinstance(share, float)
    levels = [mark.value for mark in kept["loss"][0].limits]
    assert levels == pytest.approx([start - share * (start - floor), start, floor])
    for group, column in (("memory", "reserved_mib"), ("tensors", "mem_mib")):
        for curve, rank in zip(kept[group], launches["run"].ranks, strict=True):
            assert curve.path == rank.path
            assert max(y for _, y in curve.points) == np.nanmax(rank.steps[column])
            assert [mark.value for mark in curve.limits] == [60 * 1024]
    assert [mark.value for curve in kept["gates"] for mark in curve.limits] == [0.2, 0.9]
