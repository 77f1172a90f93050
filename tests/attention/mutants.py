"""Known defects and off-by-one errors, planted one at a time in a copy of the package.

    python -m tests.attention.mutants [NAME ...]
    python -m tests.attention.mutants --answer        one name per line on standard input

Each must be killed: some test must fail. A mutant is a piece of text that occurs exactly once in
a file, and what replaces it. The copy is tested in a forked process, so that torch is imported
once for all of them, beginning with the tests that mostly see a defect at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy  # noqa: F401 - a child has it already
import pytest

from tests.attention.defects import defects

ROOT = Path(__file__).resolve().parents[2]
# Quick ones that between them see everything; slow ones (gradcheck) are left out.
TESTS = (
    "tests/attention/test_proofs.py",
    "tests/attention/test_proofs_on_device.py",
    "tests/attention/test_layer.py",
    "nsa/tests/test_selection_v2_equiv.py",
    "tests/attention/test_equations.py",
    "nsa/tests/test_whole_model.py",
    "nsa/tests/test_beginning.py",
)
# The proofs that run on the target machine: they have to see the model's defects by themselves.
WHOLE_MODEL = TESTS[-2:]
# Run before all others, in this order: quick ones of which one fails for each known mutant. They
# decide how soon a mutant dies, and nothing else: where they all pass, the rest is run.
FIRST = (
    "test_proofs_on_device.py::test_h_forced_blocks_are_inside_n[cpu-float64-masked-reference]",
    "test_proofs.py::test_turning_works_in_any_layout",
    "test_proofs_on_device.py::test_d_everything_visible_is_dense[cpu-float64-masked-reference-sel]",
    "test_proofs_on_device.py::test_f_blocks_of_one_token_collapse_to_dense[cpu-float64-masked-reference]",
    "test_proofs_on_device.py::test_d_everything_visible_is_dense[cpu-float64-masked-reference-win]",
    "test_proofs_on_device.py::test_e_each_branch_depends_on_its_keys[cpu-float64-masked-batched-win]",
    "test_proofs_on_device.py::test_k_outputs_and_gradients_are_the_equations[cpu-float64-masked-batched",
    "test_proofs_on_device.py::test_b_the_future_changes_nothing[cpu-float64-masked-reference]",
    "test_selection_v2_equiv.py::test_equivalence_various_patterns[repeats]",
    "test_proofs.py::test_large_scores_neither_overflow_nor_underflow",
    "test_beginning.py::test_weights_begin_normal_as_a_deep_model_needs_them_and_no_two_alike[few",
    "test_whole_model.py::test_outputs_are_the_equations[avg, tied head-batched v2]",
    "test_whole_model.py::test_gradients_are_the_equations[avg, tied head-batched v2]",
    "test_equations.py::test_output[sdpa-torch.bfloat16",
    "test_equations.py::test_output[sequential",
)


@dataclass(frozen=True)
class Mutant:
    """One planted defect. path: below nsa/. tests: what has to notice it."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = TESTS


MUTANTS = tuple(Mutant(name, *defect) for name, defect in defects("core").items())
MODEL_MUTANTS = tuple(
    Mutant(name, *defect, tests=WHOLE_MODEL) for name, defect in defects("model").items()
)


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy the package and its tests to `folder` and apply the mutant; its text must be there."""
    for part in ("nsa", "tests/attention"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests/__init__.py").touch()
    shutil.copy(ROOT / "tests/tiers.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    target = folder / "nsa" / mutant.path
    text = target.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.name}: its text occurs {count} times in {mutant.path}, not once")
    target.write_text(text.replace(mutant.old, mutant.new))


class _QuickFirst:
    """A plugin that puts the tests named in `FIRST` before the others."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def place(item: pytest.Item) -> int:
            named = (i for i, name in enumerate(FIRST) if f"/{name}" in item.nodeid)
            return next(named, len(FIRST))

        items.sort(key=place)


def _test_copy(folder: Path, tests: tuple[str, ...]) -> int:
    """In the child: forget the package, take the copy, and stop at the first failing test."""
    for name in [m for m in sys.modules if m.split(".")[0] in ("nsa", "tests")]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    # One failing example is enough: nobody reads a smaller one.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("first-failure", phases=phases)
    hypothesis.settings.load_profile("first-failure")
    quiet = ["-x", "-q", "--no-header", "--tb=no", "--assert=plain"]
    quiet += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*quiet, "-k", "not gradcheck", *tests], plugins=[_QuickFirst()]))


def is_killed(mutant: Mutant) -> bool:
    """Whether one of its tests fails with the mutant in place."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mutant, folder)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                with Path(os.devnull).open("w") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                    os.dup2(nowhere.fileno(), 2)
                with contextlib.suppress(SystemExit):
                    code = _test_copy(folder, mutant.tests)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # 1: tests ran and failed. Anything else but 0 is no proof: nothing was collected or run.
    if code not in (0, 1):
        raise RuntimeError(f"{mutant.name}: the tests did not run, exit code {code}")
    return code == 1


# A change without a defect has to live, or else killing means nothing.
CONTROL = Mutant(
    name="control",
    path="projection.py",
    old="angle =",
    new="angle  =",
    tests=(TESTS[0], *WHOLE_MODEL),
)


def fate(mutant: Mutant) -> str:
    """`killed` or `survived`."""
    return "killed" if is_killed(mutant) else "survived"


def answer(names: Iterable[str]) -> None:
    """Print the fate of each name as it comes, so that several workers can share the mutants."""
    known = {mutant.name: mutant for mutant in (*MUTANTS, *MODEL_MUTANTS, CONTROL)}
    for name in names:
        print(fate(known[name.rstrip("\n")]), flush=True)


def main(names: list[str]) -> int:
    """Print one line per mutant, and for the control; survivors decide the exit code."""
    chosen = [m for m in (*MUTANTS, *MODEL_MUTANTS) if not names or m.name in names]
    survivors = 0
    for mutant in chosen:
        became = fate(mutant)
        survivors += became == "survived"
        print(f"{became}\t{mutant.name}", flush=True)
    control = fate(CONTROL)
    print(f"{control}\t{CONTROL.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors or not chosen or control == "killed" else 0


if __name__ == "__main__":
    from nsa.torch_env import for_good

    # A child would look for garbage in all of it, and get a copy of what it touches.
    with for_good():
        import torch

    torch.set_num_threads(1)
    if sys.argv[1:] == ["--answer"]:
        answer(sys.stdin)
    else:
        sys.exit(main(sys.argv[1:]))
