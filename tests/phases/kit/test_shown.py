"""What phases keep for the pictures: the curves of their launches, with their limits."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from runbook.config.phase import Judgement, PlanContext
from runbook.records import Series
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder
from tests.phases.answers import WHERE


def judged(phase: str, where: PlanContext = WHERE) -> tuple[Judgement, dict[str, LaunchEvidence]]:
    found = builder.evidence(phase, where)
    return builder.judge(phase, found, where), dict(found.launches)


def csv(launch: LaunchEvidence) -> pd.DataFrame:
    return launch.training.frame


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
            assert max(y for _, y in curve.points) == pytest.approx(
                np.nanmax(rank.steps[column]) / 1024, rel=1e-5
            )
            assert curve.unit == "GiB" and [mark.value for mark in curve.limits] == [60]
    assert [mark.value for curve in kept["gates"] for mark in curve.limits] == [0.2, 0.9]
