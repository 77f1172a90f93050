"""The tests see each known defect: every mutant is killed, and the proofs of kernels see theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.attention.defects import FOLDER, defects
from tests.attention.mutants import CONTROL, MODEL_MUTANTS, MUTANTS, Mutant, is_killed
from tests.attention.triton_process import found, interpreted, needs_triton
from tests.shared import once
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


FEW = ("selected", "compressed", "window", "all", "pool", "launches", "one graph of a layer")
# By whose kernels they are.
PROOFS: dict[str, str] = {
    "selected": "core tuned tiles space list_problems trainer far far_by_block",
    "compressed": (
        "core compressed_tuned compressed_shapes ties compressed_far pool_values pool_far"
    ),
    "window": "core window_tuned window_space window_far",
    "core": "core core_space core_operator core_far launches",
}
PLANTED = {
    "selected": ("selected", "selected_by_block", "selected_lists"),
    "compressed": ("compressed", "compressed_ties", "pool"),
    "window": ("window",),
    "core": ("all",),
}
# Seen as a race, too: in the interpreter the last writer wins, and numbers alone may be right.
RACES = {
    "selected/another_head", "selected/pieces_in_one_place", "selected/parts_in_one_place",
    "compressed/compressed_another_head", "compressed/compressed_pieces_in_one_place",
    "window/window_first_head_for_all", "window/keys_in_one_place", "window/pieces_in_one_place",
    "core/pooled_twice",
    "compressed/pool_of_one_pair", "compressed/pool_gradients_in_one_place",
}  # fmt: skip
IN_32_BITS = [
    f"{of}/{name}"
    for of, kinds in (
        ("selected", ("selected_in_32_bits",)),
        ("compressed", ("compressed_in_32_bits", "pool_in_32_bits")),
        ("window", ("window_in_32_bits",)),
        ("core", ("all_in_32_bits",)),
    )
    for name in defects(*kinds)
]
SAMPLED = [
    f"{of}/{name}"
    for of, kinds in PLANTED.items()
    for name, (path, _, _) in defects(*kinds).items()
    if is_sampled(name, path) and not name.endswith("control")
]
# A change of nothing has to live, or a defect that is seen says nothing: this one is soon told.
NOTHING = "core/all_control"


# So many in a process of their own, which takes half a minute of a processor.
_AT_ONCE = 4


def together(*names: str) -> dict[str, tuple[str, ...]]:
    """By each of these proofs those that run in one process with it: of the same kernels, a few."""
    found: dict[str, tuple[str, ...]] = {}
    for _, group in groupby(names, key=lambda name: name.partition("/")[0]):
        alike = tuple(group)
        for first in range(0, len(alike), _AT_ONCE):
            few = alike[first : first + _AT_ONCE]
            found |= dict.fromkeys(few, few)
    return found


SOME = together(*SAMPLED)


@needs_triton
@pytest.mark.parametrize("kernel", (*FEW, NOTHING))
def test_each_kernel_computes_the_equations(kernel: str) -> None:
    assert found(kernel) == {kernel: []}


@needs_triton
@pytest.mark.parametrize("name", SAMPLED)
def test_a_planted_defect_is_seen(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    alike = SOME[name]
    told = once(tmp_path_factory, alike[0].replace("/", "-"), lambda _: found(*alike))
    assert told[name]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "proof", [f"{of}/{name}" for of, names in PROOFS.items() for name in names.split()]
)
def test_everything_that_a_kernel_has_to_do(proof: str) -> None:
    assert found(proof) == {proof: []}


EVERY = together(*(f"{of}/{name}" for of, kinds in PLANTED.items() for name in defects(*kinds)))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("names", dict.fromkeys(EVERY.values()), ids=lambda names: names[0])
def test_every_planted_defect_is_seen(names: tuple[str, ...]) -> None:
    """Each in a copy of its own; the controls, which change nothing, are seen as nothing."""
    told = found(*names)
    assert {name for name, problems in told.items() if not problems} == {
        name for name in told if name.endswith("control")
    }
    for name in RACES & told.keys():
        assert any("more than one writer" in text for text in told[name]), name


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_32_BITS)
def test_offsets_of_32_bits_are_seen(name: str) -> None:
    """They wrap around: other numbers are read, or nobody's."""
    ran = interpreted(name)
    assert ran.returncode < 0 or json.loads(ran.stdout)[name], ran.stderr
