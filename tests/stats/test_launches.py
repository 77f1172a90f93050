"""Published false-decision rates, at a smaller size.

400 runs per cell from a fixed seed; all cells in the long tier. A rate passes if its count is one
that the published limit allows with probability 0.9999; the last tests show that rules known to be
wrong do not pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.decisions.__main__ import main, percent, simulate
from benchmarks.decisions.catalog import Cell, Claim, all_cells
from benchmarks.decisions.noise import (
    CALM,
    NOISY,
    block_times,
    launch_effects,
    launches,
    rates,
)
from runbook.stats.arms import judge_rounds
from runbook.stats.decision import Decided
from runbook.stats.launches import meets_target
from runbook.stats.pairs import non_inferiority
from runbook.stats.plans import FUSED_PLAN
from tests.tiers import by_tier

RUNS = 400
CELLS = {cell.name: cell for cell in all_cells()}
# Where each answer turns is told in the other modules: of a question the fast tier has one cell.
FAST = {cell.question: name for name, cell in CELLS.items()}.values()


def within(count: int, runs: int, claim: Claim) -> bool:
    """Whether so many answers can be explained by chance if the claim is true."""
    if claim.at_most:
        return count <= binom.ppf(0.9999, runs, claim.limit)
    return count >= binom.ppf(0.0001, runs, claim.limit)


@pytest.mark.parametrize("name", by_tier(CELLS, fast=set(FAST).__contains__))
def test_published_rate(name: str) -> None:
    cell: Cell = CELLS[name]
    result = simulate(cell, RUNS)
    for claim in cell.claims:
        if claim.when(result):
            assert within(result.answers[claim.answer], RUNS, claim), (claim, result)


# Each of these rules is wrong, and the same bound must notice it.


def test_the_documented_rule_breaks_the_winner_bound() -> None:
    claim = Claim("wrong", 0.01)
    cell = CELLS["best arm, blocks | calm | all equal"]
    wrong = round(simulate(cell, 100).documented_rule * 100)
    assert wrong == 100
    assert not within(wrong, 100, claim)


def test_looking_after_every_round_at_full_error_breaks_the_winner_bound() -> None:
    values = rates(block_times(np.random.default_rng(5), CALM, RUNS, (1.0, 1.0, 0.9), 24))
    wrong = sum(
        any(
            judge_rounds(("a", "b", "c"), run[:rounds], error=0.01).outcome is Decided.WINNER
            for rounds in range(3, 25)
        )
        for run in values
    )
    assert not within(wrong, RUNS, Claim("wrong", 0.01))


def test_steps_as_evidence_break_the_target_bound() -> None:
    """The 50 last steps of one launch given as if they were launches, 2 % under the target."""
    times = launches(np.random.default_rng(6), CALM, RUNS, 300)
    rates = 0.98 / times[:, -50:]
    passed = sum(meets_target(row, 1.0).outcome is Decided.PASS for row in rates)
    assert not within(passed, RUNS, Claim("PASS", 0.05))


def test_a_claim_that_is_missed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = Claim("TIE", 0.0)
    cell = CELLS["best arm, blocks | calm | all equal"]
    wrong = Cell(cell.question, cell.noise, cell.truth, cell.run, (impossible,))
    monkeypatch.setattr("benchmarks.decisions.__main__.all_cells", lambda: [wrong])
    monkeypatch.setattr("sys.argv", ["decisions.py", "--runs", "20"])
    assert main() == 1


def test_keeping_early_breaks_the_bound_of_stalls() -> None:
    """Of the variants that stall in a tenth of their rounds, two in five show none in eight."""
    plan = replace(FUSED_PLAN, keep_at_end=False)
    times = block_times(
        np.random.default_rng(4), CALM, RUNS, (1.0, 1.0), plan.max_rounds,
        stall_share=0.1, stall_steps=10.0,
    )  # fmt: skip
    decisions = [non_inferiority(v[:, 0], v[:, 1], plan=plan) for v in rates(times)]
    kept = sum(decision.outcome is Decided.KEEP for decision in decisions)
    assert kept > 0.3 * RUNS
    assert not within(kept, RUNS, Claim("KEEP", 0.08))


# The noise itself.


def test_percent_never_claims_a_certainty() -> None:
    assert percent(0.0, 4000) == "0% (<0.07%)"
    assert percent(1.0, 4000) == "100% (>99.92%)"
    assert percent(0.5, 100) == "50.00% ± 5.00%"


# The noise itself.


def test_launch_noise_has_the_declared_spread_and_share() -> None:
    effects = launch_effects(np.random.default_rng(0), NOISY, (40_000,), 2)
    assert effects.std() == pytest.approx(NOISY.launch_sd, rel=0.02)
    assert np.corrcoef(effects.T)[0, 1] == pytest.approx(NOISY.shared, abs=0.02)
