"""How many steps are drawn in a launch, and how often they meet a defect that shows rarely."""

from __future__ import annotations

import pytest

from benchmarks.drawn_steps import Span, chance

TOKENS = [str(number) for number in range(300)]


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
