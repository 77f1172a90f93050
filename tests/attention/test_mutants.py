"""The tests see each known defect: every mutant is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attention.defects import FOLDER, defects
from tests.attention.mutants import CONTROL, MODEL_MUTANTS, MUTANTS, Mutant, is_killed
from tests.tiers import by_tier, is_sampled

ROOT = Path(__file__).resolve().parents[2]
KINDS = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture(scope="session")
def fate() -> Iterator[Callable[[Mutant], str]]:
    """What becomes of a mutant, told by one process that has imported torch for all of them.

    A process of its own: a fork of one whose OpenMP threads have already worked never returns.
    One for each worker, asked mutant by mutant: the workers then share the mutants evenly.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.attention.mutants", "--answer"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None

        def ask(mutant: Mutant) -> str:
            process.stdin.write(mutant.name + "\n")
            process.stdin.flush()
            answer = process.stdout.readline().strip()
            if not answer:
                said.seek(0)
                pytest.fail(f"{mutant.name}: no answer\n{said.read()}")
            return answer

        with process:
            yield ask
            process.stdin.close()


@pytest.mark.parametrize(
    "mutant",
    by_tier(
        (*MUTANTS, *MODEL_MUTANTS),
        fast=lambda mutant: is_sampled(mutant.name, mutant.path),
        name=lambda mutant: mutant.name.replace(" ", "-"),
    ),
)
def test_mutant_is_killed(mutant: Mutant, fate: Callable[[Mutant], str]) -> None:
    assert fate(mutant) == "killed", f"no test noticed: {mutant.name}"


@pytest.mark.slow
def test_an_unchanged_copy_lives(fate: Callable[[Mutant], str]) -> None:
    """Made to fail on purpose: without a defect nothing is killed, so killing means something."""
    assert fate(CONTROL) == "survived"


def test_a_mutant_without_its_text_is_refused() -> None:
    gone = Mutant(name="stale", path="projection.py", old="no such text", new="")
    with pytest.raises(ValueError, match="occurs 0 times"):
        is_killed(gone)


@pytest.mark.parametrize("kind", KINDS)
def test_every_defect_is_of_a_text_that_is_there(kind: str) -> None:
    """Also of those that the long tier alone plants."""
    package = ROOT / "nsa" if kind in ("core", "model") else ROOT / "nsa/attention/triton"
    for name, (path, old, _) in defects(kind).items():
        count = (package / path).read_text("utf-8").count(old)
        assert count == 1 or (count and package.name == "triton"), f"{name}: {count} in {path}"


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 15 and len(MODEL_MUTANTS) >= 45
    assert not {m.name for m in MUTANTS} & {m.name for m in MODEL_MUTANTS}
