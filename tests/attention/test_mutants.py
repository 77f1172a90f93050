"""Defects that are planted one at a time are noticed: by the tests, and by the kernels' judges."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attention.defects import FOLDER, defects
from tests.forks import forks
from tests.tiers import by_tier, is_sampled

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
# Who has to notice a defect of this kind, the quickest first. Of the model those tests that run on
# the target machine have to do it by themselves.
ON_TARGET = ("nsa/tests/test_beginning.py", "nsa/tests/test_whole_model.py")
TESTS = {
    "core": ("tests/attention/test_proofs.py", "nsa/tests/test_selection_v2_equiv.py",
             "tests/attention/test_layer.py", *ON_TARGET, "tests/attention/test_equations.py"),
    "model": ON_TARGET,
}  # fmt: skip
OF_KERNELS = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in TESTS)
# One failing example is enough: nobody reads a smaller one.
CONFTEST = """
import hypothesis
phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("first", phases=phases, deadline=None)
hypothesis.settings.load_profile("first")
"""


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """How the tests of a copy of the package end, by its folder and their files."""
    said = tmp_path_factory.mktemp("copies") / "stderr"
    with forks("tests.attention.in_copy", said) as ask:
        yield ask


def plant(folder: Path, kind: str, name: str) -> None:
    """Make a copy of the package with the defect in place, and of its tests."""
    for part in ("nsa", "tests/attention", "tests/factory"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("tests/__init__.py", "tests/tiers.py", "tests/forks.py", "pyproject.toml"):
        shutil.copy(ROOT / file, folder / file)
    (folder / "conftest.py").write_text(CONFTEST)
    path, old, new = defects(kind)[name]
    target = folder / "nsa" / path
    target.write_text(target.read_text().replace(old, new))


def every(*kinds: str) -> list[object]:
    """KIND/NAME of all their defects, a sample of them in the fast tier."""
    paths = {f"{kind}/{name}": path for kind in kinds for name, (path, *_) in defects(kind).items()}
    return by_tier(paths, fast=lambda one: is_sampled(one.partition("/")[2], paths[one]))


@pytest.mark.parametrize("planted", every(*TESTS))
def test_a_defect_of_the_model_is_noticed(
    planted: str, tmp_path: Path, copies: Callable[..., Any]
) -> None:
    """A change without a defect has to live, or else killing means nothing."""
    kind, _, name = planted.partition("/")
    plant(tmp_path, kind, name)
    # Any other end is no proof: nothing was collected or run.
    wanted = "OK" if name.endswith("control") else "TESTS_FAILED"
    assert copies(str(tmp_path), *TESTS[kind]) == wanted


@pytest.mark.parametrize("kind", [*TESTS, *OF_KERNELS])
def test_every_defect_is_of_a_text_that_is_there(kind: str) -> None:
    """Also of those that the long tier alone plants."""
    package = ROOT / "nsa" if kind in TESTS else ROOT / "nsa/attention/triton"
    for name, (path, old, _) in defects(kind).items():
        count = (package / path).read_text("utf-8").count(old)
        assert count == 1 or (count and kind in OF_KERNELS), f"{name}: {count} in {path}"


FEW = ("selected", "compressed", "window", "all", "pool", "launches", "operators")
MORE = ("selected_by_block", "tuned", "three terms", "space", "ties", "lists",
        "trainer", "far", "far by block", "compressed far")  # fmt: skip


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """What `in_interpreter` sees of a proof or a defect: problems, or the signal that killed it."""
    said = tmp_path_factory.mktemp("interpreter") / "stderr"
    with forks("tests.attention.in_interpreter", said, TRITON_INTERPRET="1") as ask:
        yield ask


@needs_triton
@pytest.mark.parametrize("proof", by_tier((*FEW, *MORE), FEW.__contains__))
def test_kernels_do_what_they_have_to(proof: str, interpreted: Callable[..., Any]) -> None:
    assert interpreted(proof) == []


# Seen as a race, too: in the interpreter the last writer wins, and numbers alone may be right.
RACES = {
    "selected/another_head", "selected/pieces_in_one_place", "selected_by_block/parts_in_one_place",
    "compressed/compressed_another_head", "compressed/compressed_pieces_in_one_place",
    "window/window_first_head_for_all", "window/keys_in_one_place", "window/pieces_in_one_place",
    "all/pooled_twice", "pool/pool_of_one_pair", "pool/pool_gradients_in_one_place",
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("planted", every(*OF_KERNELS))
def test_a_defect_of_a_kernel_is_seen(planted: str, interpreted: Callable[..., Any]) -> None:
    """In a copy of its own, whose process may die where it reads or writes what is nobody's."""
    problems = interpreted(planted)
    if isinstance(problems, int):
        assert not planted.endswith("control"), f"killed by signal {-problems}"
        return
    assert bool(problems) != planted.endswith("control"), problems
    assert planted not in RACES or any("more than one writer" in text for text in problems)
