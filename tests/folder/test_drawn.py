"""How many steps are drawn in a launch, and how often they meet a defect that shows rarely."""

from __future__ import annotations

import pytest

from nsa.contract.digests import recomputed_steps

TOKENS = [str(number) for number in range(300)]


def drawn(token: str, steps: int) -> tuple[int, ...]:
    """The steps of a launch that are computed twice."""
    return recomputed_steps(token, 1, steps, profiled=False)


@pytest.mark.parametrize(("steps", "pairs"), [(400, 3), (1200, 5), (5000, 20)])
def test_the_chance_to_meet_one_step_in_a_hundred(steps: int, pairs: int) -> None:
    """A pair begins anywhere but at the last step, and meets the defect in one of its two steps."""
    share = 2 * (steps // 100) / (steps - 1)
    wanted = 1 - (1 - share) ** pairs
    met = sum(any(step % 100 == 98 for step in drawn(str(n), steps)) for n in range(4000))
    assert met / 4000 == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / 4000) ** 0.5)


def test_what_shows_in_the_first_step_is_always_met() -> None:
    assert all(drawn(token, 60)[0] == 1 for token in TOKENS)
