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

from tests.attention.model_mutants import MODEL_DEFECTS

ROOT = Path(__file__).resolve().parents[2]
# Quick ones that between them see everything; slow ones (gradcheck) are left out.
TESTS = (
    "tests/attention/test_proofs.py",
    "tests/attention/test_layer.py",
    "nsa/tests/test_selection_v2_equiv.py",
    "tests/attention/test_equations.py",
)
# The proof that runs on the target machine: it has to see the model's defects by itself.
WHOLE_MODEL = ("nsa/tests/test_whole_model.py",)
# Run before all others, in this order: quick ones of which one fails for each known mutant. They
# decide how soon a mutant dies, and nothing else: where they all pass, the rest is run.
FIRST = (
    "test_proofs.py::test_h_forced_blocks_are_inside_n[3]",
    "test_layer.py::test_the_layer_is_its_parts",
    "test_proofs.py::test_c_turning_works_in_any_layout",
    "test_proofs.py::test_d_selecting_everything_is_dense[1-reference]",
    "test_proofs.py::test_f_blocks_of_one_token_collapse_to_dense[reference]",
    "test_proofs.py::test_d_a_window_over_everything_is_dense[reference]",
    "test_proofs.py::test_h_ties_go_to_the_lower_index",
    "test_proofs.py::test_e_each_branch_depends_on_its_keys[win-batched]",
    "test_proofs.py::test_k_path_parity[7-",
    "test_proofs.py::test_k_path_parity[33-batched-v2]",
    "test_proofs.py::test_b_the_future_changes_nothing[6-avg-reference]",
    "test_selection_v2_equiv.py::test_equivalence_various_patterns[repeats]",
    "test_proofs.py::test_large_scores_neither_overflow_nor_underflow",
    "test_proofs.py::test_decoding_continues_what_prefill_began",
    "test_equations.py::test_bfloat16_through_native_kernels",
    "test_equations.py::test_sequential_output",
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One planted defect. path: below nsa/. tests: what has to notice it."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = TESTS


def _mutant(name: str, path: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, path=path, old=old, new=new)


MUTANTS = (
    # What the trainer behind the documents really did.
    _mutant(
        "compressed branch returns V of block 0",
        "attention/token.py",
        'o_cmp = torch.einsum("bgchn,bgnd->bgchd", p_cmp, v_cmp)',
        "o_cmp = (p_cmp.sum(-1) > 0)[..., None] * v_cmp[:, :, None, :1].sum(3, keepdim=True)",
    ),
    _mutant(
        "selected branch returns V of its first key",
        "attention/token.py",
        'return torch.einsum("bgcht,bgtd->bgchd", logits.softmax(-1), values)',
        'return torch.einsum("bgcht,bgtd->bgchd", 0 * logits.softmax(-1) + 1, values)[..., :] * 0'
        " + values[:, :, None, :1]",
    ),
    _mutant(
        "window branch sees only its first key",
        "attention/token.py",
        "logits.softmax(-1), x.v_win)",
        "logits[..., :1].softmax(-1), x.v_win[:, :1])",
    ),
    _mutant(
        "positions are not turned",
        "projection.py",
        "positions.to(torch.float64)[:, None] * frequency",
        "positions.to(torch.float64)[:, None] * 0 * frequency",
    ),
    _mutant(
        "the current block is not selected",
        "attention/selection.py",
        "(age < FORCED_LOCAL_BLOCKS)",
        "((age > 0) & (age <= FORCED_LOCAL_BLOCKS))",
    ),
    _mutant(
        "the values of the pieces get no gradient",
        "attention/cpu/dense.py",
        "dv.baddbmm_(p.transpose(1, 2), grad)",
        "dv.add_(0)",
    ),
    _mutant(
        "selected queries see the rest of their block",
        "attention/cpu/schedule.py",
        "_ahead(cfg.l_sel, dtype)",
        "Edge.hiding(torch.zeros(cfg.l_sel, cfg.l_sel) > 0, slice(None), dtype)",
    ),
    # Equation 9.
    _mutant(
        "equation 9 read 1-based scores the neighbour",
        "attention/compression.py",
        "pairs.append((offset, shared))",
        "pairs.append((offset - 1, shared))",
    ),
    _mutant(
        "equation 9 without weights",
        "attention/compression.py",
        "pairs.append((offset, shared))",
        "pairs.append((offset, 1))",
    ),
    _mutant(
        "equation 9 forgets the block before",
        "attention/compression.py",
        "for offset in range(1 - per_block, per_sel):",
        "for offset in range(0, per_sel):",
    ),
    # Compression and visibility.
    _mutant(
        "a compressed block is visible one token early",
        "attention/compression.py",
        "torch.div(positions + 1 - cfg.l, cfg.d",
        "torch.div(positions + 2 - cfg.l, cfg.d",
    ),
    _mutant(
        "a compressed block is visible one token late",
        "attention/compression.py",
        "torch.div(positions + 1 - cfg.l, cfg.d",
        "torch.div(positions - cfg.l, cfg.d",
    ),
    _mutant(
        "a compressed block is visible one token early on the CPU",
        "attention/cpu/schedule.py",
        "+ 1 - cfg.l) // cfg.d + 1",
        "+ 2 - cfg.l) // cfg.d + 1",
    ),
    _mutant(
        "a compressed block is visible one token early in SDPA",
        "attention/compressed.py",
        "torch.arange(cfg.l - 1, cfg.l - 1 +",
        "torch.arange(cfg.l - 2, cfg.l - 2 +",
    ),
    _mutant(
        "invisible compressed keys take part in the softmax",
        "attention/compression.py",
        "hidden = ~visible & (count > 0)",
        "hidden = visible & (count < 0)",
    ),
    _mutant(
        "the mean is over the stride", "attention/compression.py", "total / cfg.l", "total / cfg.d"
    ),
    # Selection.
    _mutant(
        "the initial block is not forced",
        "attention/selection.py",
        "forced = (block == 0) | (",
        "forced = (block < 0) | (",
    ),
    _mutant(
        "only one local block is forced",
        "attention/selection.py",
        "(age < FORCED_LOCAL_BLOCKS)",
        "(age < 1)",
    ),
    _mutant(
        "three local blocks are forced",
        "attention/selection.py",
        "(age < FORCED_LOCAL_BLOCKS)",
        "(age < 3)",
    ),
    _mutant(
        "the next block fills a free place",
        "attention/selection.py",
        "order.masked_fill(order > current, n_blocks)",
        "order.masked_fill(order > current + 1, n_blocks)",
    ),
    _mutant(
        "ties go to the higher index",
        "attention/selection.py",
        "order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :taken]",
        "order = (n_blocks - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True)"
        ".indices)[..., :taken]",
    ),
    _mutant(
        "heads of a group are not summed",
        "attention/selection.py",
        "block_scores(p.sum(3), n_blocks, cfg)",
        "block_scores(p[:, :, :, 0], n_blocks, cfg)",
    ),
    _mutant(
        "heads of a group are not summed on the CPU",
        "attention/cpu/passes.py",
        "split_dim(p, 1, heads).sum(2)",
        "split_dim(p, 1, heads)[:, :, 0]",
    ),
    _mutant(
        "heads of a group are not summed in SDPA",
        "attention/compressed.py",
        "p[:, skip:].sum(2)",
        "p[:, skip:, 0]",
    ),
    # Ranges.
    _mutant(
        "v2 looks one token ahead",
        "attention/selection.py",
        "torch.minimum(ordered + cfg.l_sel, times + 1)",
        "torch.minimum(ordered + cfg.l_sel, times + 2)",
    ),
    _mutant(
        "v1 looks one token ahead",
        "attention/selection.py",
        "min((block + 1) * l_sel, t + 1)",
        "min((block + 1) * l_sel, t + 2)",
    ),
    _mutant(
        "v2 merges over gaps",
        "attention/selection.py",
        "ordered - before > cfg.l_sel",
        "ordered - before > 2 * cfg.l_sel",
    ),
    # Window.
    _mutant(
        "the window is one too long in the reference",
        "attention/reference.py",
        "positions > positions[:, None] - cfg.w",
        "positions >= positions[:, None] - cfg.w",
    ),
    _mutant(
        "the window is one too short token by token",
        "attention/token.py",
        "max(0, t + 1 - cfg.w)",
        "max(0, min(t, t + 2 - cfg.w))",
    ),
    _mutant(
        "the window is one too long in SDPA",
        "attention/window.py",
        "hidden.tril()",
        "hidden.tril(-1)",
    ),
    _mutant(
        "the window is one too long on the CPU",
        "attention/cpu/schedule.py",
        "key <= query - w",
        "key < query - w",
    ),
    _mutant(
        "the window is one too long in decoding",
        "attention/decode.py",
        "[:, -self.cfg.w :]",
        "[:, -self.cfg.w - 1 :]",
    ),
    _mutant(
        "the window reaches before the first token in SDPA",
        "attention/window.py",
        'bias[0, :, :w] = float("-inf")',
        "bias[0, :, :w] += 0",
    ),
    _mutant(
        "selected queries see the rest of their block in SDPA",
        "attention/sdpa.py",
        "masked_fill(ahead,",
        "masked_fill(ahead & False,",
    ),
    _mutant(
        "the mask that is made again hides nothing",
        "attention/sdpa.py",
        "make().expand(kept)",
        "torch.zeros_like(make()).expand(kept)",
    ),
    _mutant(
        "compressed key gradients are not scaled in SDPA",
        "attention/compressed.py",
        "dk = dk.mul_(ctx.scale)",
        "dk = dk.mul_(1)",
    ),
    _mutant(
        "a gate's gradient is the neighboring branch's",
        "attention/sdpa.py",
        "return *grads, d_gates.to(gates.dtype)",
        "return *grads, d_gates.roll(1, -1).to(gates.dtype)",
    ),
    # Arithmetic of the fast path.
    _mutant(
        "the softmax's row term is dropped",
        "attention/cpu/passes.py",
        "d_gate.mul_(gate)",
        "d_gate.mul(0)",
    ),
    _mutant(
        "key gradients are not scaled", "attention/cpu/function.py", "dk.mul_(plan.scale)", "dk"
    ),
    _mutant(
        "partial results are not weighted by their maxima",
        "attention/cpu/blocks.py",
        "peak.sub_(highest).exp_()",
        "peak.sub_(highest).mul_(0).exp_()",
    ),
    _mutant(
        "a block is cached one token late",
        "attention/decode.py",
        "if self.length >= self.cfg.l and",
        "if self.length > self.cfg.l and",
    ),
    _mutant(
        "gates of two branches are swapped",
        "attention/reference.py",
        "gates[..., 1:2] * o_sel + gates[..., 2:3] * o_win",
        "gates[..., 2:3] * o_sel + gates[..., 1:2] * o_win",
    ),
    _mutant("gates are not a sigmoid", "projection.py", ".sigmoid_()", ".tanh_()"),
)


MODEL_MUTANTS = tuple(
    Mutant(name=name, path=path, old=old, new=new, tests=WHOLE_MODEL)
    for name, path, old, new in MODEL_DEFECTS
)


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy the package and its tests to `folder` and apply the mutant; its text must be there."""
    for part in ("nsa", "tests/attention"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests/__init__.py").touch()
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
    tests=(*TESTS[:2], *WHOLE_MODEL),
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
