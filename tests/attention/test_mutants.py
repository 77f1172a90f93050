"""The tests see each known defect: every mutant is killed."""

from __future__ import annotations

import pytest

from tests.attention.mutants import MUTANTS, TESTS, Mutant, is_killed


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_is_killed(mutant: Mutant) -> None:
    assert is_killed(mutant), f"no test noticed: {mutant.name}"


@pytest.mark.slow
def test_an_unchanged_copy_lives() -> None:
    """Made to fail on purpose: without a defect nothing is killed, so killing means something."""
    same = Mutant(name="nothing", path="rope.py", old="angle =", new="angle  =")
    assert not is_killed(same, TESTS[:2])


def test_a_mutant_without_its_text_is_refused() -> None:
    gone = Mutant(name="stale", path="rope.py", old="no such text", new="")
    with pytest.raises(ValueError, match="occurs 0 times"):
        is_killed(gone)


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 15 and len({m.name for m in MUTANTS}) == len(MUTANTS)
