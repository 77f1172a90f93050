"""The tests see each known defect: every mutant is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attention.mutants import CONTROL, MUTANTS, Mutant, is_killed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fates() -> dict[str, str]:
    """What became of each mutant, from one run of the script.

    A process of its own: a fork of one whose OpenMP threads have already worked never returns.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.mutants"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.partition("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert lines, done.stderr
    return {name: fate for fate, _, name in lines}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_is_killed(mutant: Mutant, fates: dict[str, str]) -> None:
    assert fates.get(mutant.name) == "killed", f"no test noticed: {mutant.name}"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_unchanged_copy_lives(fates: dict[str, str]) -> None:
    """Made to fail on purpose: without a defect nothing is killed, so killing means something."""
    assert fates[CONTROL.name] == "survived"


def test_a_mutant_without_its_text_is_refused() -> None:
    gone = Mutant(name="stale", path="projection.py", old="no such text", new="")
    with pytest.raises(ValueError, match="occurs 0 times"):
        is_killed(gone)


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 15 and len({m.name for m in MUTANTS}) == len(MUTANTS)
