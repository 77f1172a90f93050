"""The loss of a trainer that is not ours: a divergence is one, and no healthy curve is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phases.training.own import diverged
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.own.runs import document, judged, launched, profile_of

Curve = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def falling(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """Towards a floor, with noise that grows with the loss."""
    level = random.uniform(0.01, 3.0)
    curve = level + random.uniform(0.1, 30.0) * np.exp(-t * random.uniform(0.5, 30.0))
    return curve * np.exp(random.normal(0, random.uniform(0.01, 0.5), t.size))


def plateau(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """It learns nothing, at any level."""
    return 10 ** random.uniform(-3, 9) * np.exp(random.normal(0, 0.5, t.size))


def bump(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """Up to twenty times its first value while the learning rate warms up, and down again."""
    height, at = random.uniform(1, 20), random.uniform(0.02, 0.4)
    rise = height * np.exp(-(((t - at) / 0.1) ** 2))
    return (4.0 - 2.0 * t + rise) * np.exp(random.normal(0, 0.1, t.size))


def averaged(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """A running mean that began at 0."""
    begun = 1 - np.exp(-t * random.uniform(20, 200) - 0.01)
    return begun * (4.0 - 2.0 * t) * np.exp(random.normal(0, 0.02, t.size))


@pytest.mark.parametrize("curve", [falling, plateau, bump, averaged])
def test_no_healthy_loss_diverged(curve: Curve) -> None:
    """A thousand draws of each, of 40 to 600 readings."""
    random = np.random.default_rng(5)
    for _ in range(1000):
        losses = curve(random, np.linspace(0, 1, int(random.integers(40, 600))))
        assert not diverged(losses), losses.tolist()


def risen(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """It falls to 2, and from somewhere on it is at a thousand, give or take."""
    broke = random.uniform(0.3, 0.7)
    wild = 1000 * np.exp(random.normal(0, 0.7, t.size))
    return np.where(t < broke, 4.6 - 2.6 * np.minimum(1, 4 * t), wild)


def wild(random: np.random.Generator, t: np.ndarray) -> np.ndarray:
    """As measured with a learning rate of 30: from the first row on beyond everything."""
    return 10 ** (9.6 + random.normal(0, 0.75, t.size))


@pytest.mark.parametrize(
    ("curve", "words", "least"), [(risen, "rose from", 1000), (wild, "swings between", 900)]
)
def test_a_loss_that_diverged_is_known(curve: Curve, words: str, least: int) -> None:
    random = np.random.default_rng(6)
    found = [diverged(curve(random, np.linspace(0, 1, 125))) for _ in range(1000)]
    assert sum(words in one for one in found) >= least


def test_a_loss_at_0_or_below_and_a_short_one_have_no_scale() -> None:
    curve = risen(np.random.default_rng(1), np.linspace(0, 1, 125))
    assert diverged(curve) and not diverged(curve - 2.1) and not diverged(curve[:24])


def with_loss(evidence: LaunchEvidence, loss: Callable[[np.ndarray], np.ndarray]) -> LaunchEvidence:
    """As if each of its 120 steps had come by itself."""
    log = evidence.training
    assert log is not None
    steps, rows = np.arange(1, 121), log.frame.iloc[[0] * 120].reset_index(drop=True)
    frame = rows.assign(step=steps, dt_s=0.01, told_s=0.01, loss=loss(steps / 120))
    return replace(evidence, training=replace(log, frame=frame))


def test_each_end_of_a_loss_is_told_as_what_it_is(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, document())
    evidence = launched(profile, tmp_path / "run", "long_run")

    def learns(loss: Callable[[np.ndarray], np.ndarray]) -> Check:
        return judged(profile, with_loss(evidence, loss), "long_run")["learns"]

    random = np.random.default_rng(7)
    up = learns(lambda t: risen(random, t))
    assert (up.outcome, up.code) == (Outcome.FAIL, Reason.NOT_LEARNING)
    assert up.title.startswith("Training diverged: the loss rose from 2")
    assert "a tenth of its learning rate" in up.remedy
    far = learns(lambda t: 4e5 * np.exp(random.normal(0, 0.4, t.size)))
    assert far.outcome is Outcome.INCONCLUSIVE and "it diverged before the first row" in far.reason
    assert "a tenth of its learning rate" in far.remedy
    memory = learns(lambda t: 5 * np.exp(-40 * t + random.normal(0, 0.3, t.size)) + 1e-5)
    assert memory.outcome is Outcome.PASS and "fell by" in memory.reason
    flat = learns(lambda t: 4.6 + random.normal(0, 0.1, t.size))
    assert flat.outcome is Outcome.INCONCLUSIVE and "it is not known to learn" in flat.reason
    assert "diverged" not in flat.reason and "fell" not in flat.reason
    # One that is no number is one cause.
    spoiled = with_loss(evidence, lambda t: np.where(t < 0.755, 3.0 - t, math.nan))
    checks = judged(profile, spoiled, "long_run")
    assert checks["loss_finite"].outcome is Outcome.FAIL
    assert "in bf16 or fp16, which nothing here tells" in checks["loss_finite"].remedy
    for name in ("plausible", "learns"):
        assert checks[name].follows == "long_run.loss_finite", checks[name].reason
        assert "30 of 120 rows, the first at step 91" in checks[name].reason
