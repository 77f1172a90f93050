"""What the profile is made of."""

from __future__ import annotations

from nsa.train.profiling import covered


def test_covered_is_the_length_of_the_union() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert covered([]) == 0
