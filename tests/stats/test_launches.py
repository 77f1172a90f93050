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
from benchmarks.decisions.cells import halves_differ, last_50
from benchmarks.decisions.noise import (
    CALM,
    NOISY,
    V4_LIKE,
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
from runbook.stats.steady import steady
from tests.stats.tables import best_arm, table_of
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


def test_every_published_figure_has_a_cell() -> None:
    claimed = {
        (cell.question.split(",")[0], claim.answer, claim.limit)
        for cell in CELLS.values()
        for claim in cell.claims
    }
    assert {
        ("best arm", "wrong", 0.01),
        ("best arm", "right", 0.99),
        ("fused AdamW (margin 2 %)", "KEEP", 0.001),
        ("fused AdamW (margin 2 %)", "KEEP", 0.90),
        ("throughput target", "PASS", 0.05),
        ("steady", "PASS", 0.01),
        ("steady", "FAIL", 0.01),
        ("fused AdamW (margin 2 %)", "DROP", 0.005),
        ("fused AdamW that stalls in a tenth of its rounds", "KEEP", 0.08),
        ("A/A", "alarm", 0.01),
        ("A/A of fused AdamW on the CPU profile", "alarm", 0.01),
        ("steady", "INCONCLUSIVE", 0.10),
        ("memory plateau", "PASS", 0.001),
        ("memory plateau", "FAIL", 0.05),
        ("scaling (limit 0.90)", "PASS", 0.01),
        ("scaling (limit 0.90)", "PASS", 0.90),
    } <= claimed


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


def test_a_t_test_on_steps_breaks_the_steady_bound() -> None:
    times = launches(np.random.default_rng(7), CALM, RUNS, 1200, drift=False)[:, 20:]
    assert not within(int(halves_differ(times).sum()), RUNS, Claim("FAIL", 0.05))


def test_a_blunt_interval_breaks_the_drift_bound() -> None:
    """A tolerance of 6 % calls a drift of 5 % steady: the bound must see it."""
    times = launches(np.random.default_rng(8), CALM, 100, 1200, drift=False, trend=0.05)
    level = sum(steady(run, tolerance=0.06).outcome is Decided.PASS for run in times)
    assert not within(level, 100, Claim("PASS", 0.01))


def test_without_pairing_the_blocks_the_drift_decides() -> None:
    """Arms one after the other instead of in rounds: slow drift makes winners of equal arms."""
    rng = np.random.default_rng(9)
    wrong = 0
    for _ in range(200):
        drift = np.exp(np.linspace(0.0, 0.04, 24))[:, None]
        rate = (drift * np.exp(rng.normal(0.0, 0.004, (24, 1)))).reshape(3, 8).T
        wrong += best_arm(table_of(rate)).outcome is Decided.WINNER
    assert not within(wrong, 200, Claim("wrong", 0.01))


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


def test_last_50_is_the_mean_of_rates() -> None:
    times = np.concatenate([np.full((1, 10), 9.0), np.full((1, 25), 1.0), np.full((1, 25), 2.0)], 1)
    assert last_50(times)[0] == pytest.approx(0.75)


# The noise itself.


def test_launch_noise_has_the_declared_spread_and_share() -> None:
    effects = launch_effects(np.random.default_rng(0), NOISY, (40_000,), 2)
    assert effects.std() == pytest.approx(NOISY.launch_sd, rel=0.02)
    assert np.corrcoef(effects.T)[0, 1] == pytest.approx(NOISY.shared, abs=0.02)


def test_steps_have_the_declared_spread_and_correlation() -> None:
    times = launches(
        np.random.default_rng(1), CALM, 400, 600, launch_effect=np.zeros(400), drift=False
    )
    logs = np.log(times[:, 50:])
    assert logs.std() == pytest.approx(CALM.step_sd, rel=0.03)
    both = np.corrcoef(logs[:, 1:].ravel(), logs[:, :-1].ravel())
    assert both[0, 1] == pytest.approx(CALM.rho, abs=0.02)


def test_v4_like_noise_looks_like_the_rows_of_that_report() -> None:
    """First step at 60-80 % of the pace; now and then a row at about a third."""
    times = launches(np.random.default_rng(2), V4_LIKE, 2000, 200)
    rates = np.median(times[:, 20:]) / times
    assert 0.6 < np.median(rates[:, 0]) < 0.8
    assert 0.02 < np.mean(rates[:, 20:] < 0.5) < 0.2


def test_blocks_give_each_arm_its_own_speed() -> None:
    measured = rates(block_times(np.random.default_rng(3), CALM, 2000, (1.0, 1.5, 0.7), 4))
    middle = np.exp(np.log(measured).mean(axis=(0, 1)))
    assert middle[1] / middle[0] == pytest.approx(1.5, rel=0.01)
    assert middle[2] / middle[0] == pytest.approx(0.7, rel=0.01)
