"""How many steps are drawn in a launch, and how often they meet a defect that shows rarely."""

from __future__ import annotations

import pytest

from benchmarks.drawn_steps import Span, chance
from nsa.contract.sampling import recomputed_steps, watched_steps

TOKENS = [str(number) for number in range(300)]


@pytest.mark.parametrize(
    ("steps", "pairs"), [(9, 0), (25, 2), (60, 3), (719, 3), (1200, 5), (5000, 20), (50_000, 25)]
)
def test_a_long_launch_has_more_pairs_and_at_most_so_many(steps: int, pairs: int) -> None:
    drawn = [recomputed_steps(token, 1, steps) for token in TOKENS]
    assert max(map(len, drawn)) <= 1 + 2 * pairs
    if steps > 1000:
        # Two pairs seldom meet.
        assert max(map(len, drawn)) == 1 + 2 * pairs
        assert max(map(len, drawn)) <= 1 + steps / 100
    for token, found in zip(TOKENS, drawn, strict=True):
        assert found[0] == 1 and set(found) <= set(watched_steps(token, 1, steps))


@pytest.mark.parametrize(("steps", "pairs"), [(400, 3), (1200, 5), (5000, 20)])
def test_the_chance_to_meet_one_step_in_a_hundred(steps: int, pairs: int) -> None:
    """A pair begins anywhere but at the last step, and meets the defect in one of its two steps."""
    span = Span(name="run", first=1, last=steps)
    share = 2 * (steps // 100) / (steps - 1)
    wanted = 1 - (1 - share) ** pairs
    found = chance([span], Span.recomputed, period=100, tokens=4000)
    assert found == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / 4000) ** 0.5)


def test_what_shows_in_the_first_step_is_always_met() -> None:
    span = Span(name="run", first=1, last=60)
    assert all(span.recomputed(token)[0] == 1 for token in TOKENS)
