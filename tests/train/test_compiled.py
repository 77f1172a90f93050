"""The dense parts through torch.compile: the same numbers, few graphs, and none in a timed step."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nsa import dense
from nsa.config import ModelConfig, NSAConfig, Way
from nsa.contract import Event
from nsa.kernels import compiled
from nsa.kernels.compiled import Compiled, Compiling, backward_nodes, compile_dense, count_compiled
from nsa.kernels.kernel_check import compare
from nsa.launch import arms
from nsa.launch.arms import why_not
from nsa.model import NSALanguageModel
from nsa.rounding import FLOAT32_SUMS, Gap
from nsa.toggles import parse_toggles

SHAPE = NSAConfig(dim=16, n_heads=4, n_kv_groups=2, d_k=6, d_v=6, l=6, d=3, l_sel=6, n_sel=3, w=7)
EAGER = dense.Dense(
    enter_together=dense.enter_together,
    enter_apart=dense.enter_apart,
    leave=dense.leave,
    loss=dense.mean_loss,
)


def model_of(**changes: Any) -> NSALanguageModel:
    torch.manual_seed(0)
    return NSALanguageModel(ModelConfig(vocab_size=11, n_layers=2, attention=SHAPE, **changes))


def gradients(model: NSALanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    dense.mean_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("by_sdpa", [False, True])
def test_the_functions_are_what_the_modules_do(by_sdpa: bool) -> None:
    """In float64, so that another order of operations is nothing beside another formula."""
    model, tokens = model_of().double(), torch.randint(11, (2, 40))
    model.attend_by(Way(force_sdpa=by_sdpa))
    before = gradients(model, tokens)
    model.use(EAGER)
    after = gradients(model, tokens)
    assert before.keys() == after.keys()
    for name, gradient in before.items():
        assert torch.allclose(after[name], gradient, rtol=1e-10, atol=1e-13), name


@pytest.mark.parametrize("path", ["sequential", "reference"])
def test_every_path_can_be_entered(path: str) -> None:
    model, tokens = model_of(way=Way(path=path)).double(), torch.randint(11, (1, 20))
    before = model(tokens)
    model.use(EAGER)
    assert torch.allclose(model(tokens), before, rtol=1e-10, atol=1e-13)


def _no_rotation(*args: Any) -> tuple[Tensor, ...]:
    x, norm, in_proj, bias, turns, cfg = args
    still = torch.stack((torch.ones_like(turns[..., 0]), torch.zeros_like(turns[..., 0])), -1)
    return dense.enter_apart(x, norm, in_proj, bias, still, cfg)


class _WrongSlope(torch.autograd.Function):
    """The right value, and a gradient that is off by a thousandth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


def _wrong_slope(x: Tensor, attended: Tensor, norm: Any, mlp: Any) -> Tensor:
    return _WrongSlope.apply(dense.leave(x, attended, norm, mlp))


DEFECTS = {
    "no rotation": (EAGER, {"enter_apart": _no_rotation}, "enter"),
    "wrong gradient": (EAGER, {"leave": _wrong_slope}, "leave"),
    "sum for mean": (EAGER, {"loss": lambda z, t: dense.mean_loss(z, t) * t.numel()}, "loss"),
    "not finite": (EAGER, {"loss": lambda z, t: dense.mean_loss(z, t) * torch.nan}, "loss"),
}


@pytest.mark.parametrize("defect", [None, *DEFECTS])
def test_other_numbers_are_noticed_before_a_step(defect: str | None) -> None:
    model = model_of()
    functions, changes, part = DEFECTS[defect] if defect else (EAGER, {}, "")
    model.use(dense.Dense(**{**vars(functions), **changes}))
    random = torch.get_rng_state()
    gaps = compare(model, tokens=(2, 24), autocast=torch.enable_grad)
    assert [gap.what.split(",")[0] for gap in gaps if gap.too_wide] == ([part] if part else [])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_bound_is_twice_our_own_error() -> None:
    assert not Gap.twice(what="", error=2e-3, ours=1e-3).too_wide
    assert Gap.twice(what="", error=2.1e-3, ours=1e-3).too_wide
    assert not Gap.twice(what="", error=FLOAT32_SUMS, ours=0.0).too_wide
    assert Gap.twice(what="", error=float("nan"), ours=1.0).too_wide
    # Wherever it stands among others: no comparison with it is true.
    lost = Gap.twice(what="lost", error=float("nan"), ours=1.0)
    found = Gap.twice(what="found", error=3e-3, ours=1e-3)
    assert max((found, lost), key=lambda gap: gap.beyond) is lost
    assert max((lost, found), key=lambda gap: gap.beyond) is lost


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        ({"NSA_COMPILE": "graphs"}, "cpu", "need a CUDA device, this is cpu; use dense"),
        ({"NSA_COMPILE": "dense"}, "cuda", "the package triton is not installed"),
        ({"NSA_COMPILE": "dense"}, "cpu", "no C++ compiler here (g++, clang++, c++)"),
        ({"NSA_LIGER": "1"}, "cpu", "need a CUDA device, this is cpu; set it to 0"),
        ({"NSA_LIGER": "1"}, "auto", "the package liger-kernel is not installed; pip install"),
        ({"NSA_COMPILE": "graphs"}, "auto", None),
        ({"NSA_COMPILE": "off", "NSA_LIGER": "0"}, "cpu", None),
    ],
)
def test_what_is_missing_is_said_before_it_is_needed(
    asked: dict[str, str], device: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(arms.shutil, "which", lambda _: None)
    found = why_not(parse_toggles(asked), device)
    assert (found is None) == (words is None)
    assert words is None or (found is not None and words in found)


class Beats:
    """What would be written."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    def write(self, event: Event, **fields: Any) -> None:
        self.written.append({"event": event, **fields})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """The compiler's counts, one look after the other."""
    looks: list[Compiled] = []
    monkeypatch.setattr("nsa.kernels.compiled.count_compiled", lambda: looks.pop(0))
    yield looks


def test_only_timed_steps_are_spoiled(counted: list[Compiled]) -> None:
    beats = Beats()
    compiling = Compiling(cast("Any", beats))
    counted += [Compiled(graphs=3), Compiled(graphs=3), Compiled(graphs=4), Compiled(graphs=6)]
    compiling.note("block")
    compiling.note("step", timed=True)
    assert compiling.in_steps == 0 and len(beats.written) == 1
    compiling.note("step", timed=True)
    compiling.note("eval")
    assert compiling.in_steps == 1
    assert [(beat["where"], beat["added"]) for beat in beats.written] == [
        ("block", 3),
        ("step", 1),
        ("eval", 2),
    ]
    compiling.begin_block()
    assert compiling.in_steps == 0


def test_a_recorded_cuda_graph_counts_as_work(counted: list[Compiled]) -> None:
    compiling = Compiling(cast("Any", Beats()))
    counted += [Compiled(graphs=3, recorded=5)]
    compiling.note("step", timed=True)
    assert compiling.in_steps == 8


def test_gradients_are_copied_out_of_the_memory_of_a_replay() -> None:
    """A second replay writes where the first one's gradients lie: the sum must not notice."""
    pool = torch.zeros(3)

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor, value: float) -> Tensor:
            ctx.value = value
            return w.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            # Another tensor over the same memory each time, as a replay gives: autograd keeps it.
            return torch.empty(0).set_(pool.fill_(ctx.value)), None

    def accumulated(*, keep: bool) -> Tensor:
        w = torch.nn.Parameter(torch.ones(3))
        handles = compiled.keep_gradients([w]) if keep else []
        for value in (1.0, 2.0):
            Replayed.apply(w, value).backward()
        assert len(handles) == keep and w.grad is not None
        return w.grad.clone()

    assert accumulated(keep=True).tolist() == [3.0] * 3
    assert accumulated(keep=False).tolist() != [3.0] * 3, "made to fail on purpose"


# -- the real compiler -----------------------------------------------------------------------------


def real_compiler(test: Any) -> Any:
    """Slow, and torch's own warnings while it compiles are not ours."""
    for warning in ("The .grad attribute:UserWarning", ".*torch.jit.*:DeprecationWarning"):
        test = pytest.mark.filterwarnings(f"ignore:{warning}")(test)
    return pytest.mark.slow(test)


@real_compiler
def test_compiled_is_what_our_modules_give() -> None:
    """Values, gradients, one graph for all layers, names of parameters; and what makes more."""
    model, tokens = model_of(), torch.randint(11, (2, 41))
    names = list(model.state_dict())
    before = gradients(model, tokens)
    start = count_compiled().graphs
    functions = compile_dense("dense")
    model.use(functions)

    def loss(rows: Tensor) -> Tensor:
        return functions.loss(model(rows[:, :-1]), rows[:, 1:])

    first = loss(tokens)
    nodes = backward_nodes(first)
    assert nodes[compiled.COMPILED_NODE] == 2 * 2 + 1
    model.zero_grad()
    first.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gap = (parameter.grad - before[name]).norm() / before[name].norm()
        assert gap < 1e-5, name
    assert count_compiled().graphs == start + 3, "two layers share their graphs"
    gaps = compare(model, tokens=(2, 40), autocast=torch.enable_grad)
    assert not any(gap.too_wide for gap in gaps)
    assert count_compiled() == Compiled(graphs=start + 3)
    assert list(model.state_dict()) == names
    again = model_of(gradient_checkpointing=True)
    again.use(functions)
    recomputed = gradients(again, tokens)
    for name, gradient in before.items():
        assert (recomputed[name] - gradient).norm() < 1e-5 * gradient.norm(), name
    assert count_compiled().graphs == start + 3, "recomputation runs the same graphs"
    loss(tokens[:, :31])
    assert count_compiled().graphs == start + 6, "another length: every function anew"


@real_compiler
def test_more_graphs_than_can_be_meant_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)  # puts it back afterwards
    monkeypatch.setattr(compiled, "_MOST_GRAPHS", 1)
    functions = compile_dense("dense")
    logits = torch.randn(1, 4, 11)
    functions.loss(logits, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(Exception, match="fail_on_recompile_limit_hit"):
        functions.loss(logits[:, :3], torch.zeros(1, 3, dtype=torch.int64))


def test_a_copy_of_the_model_runs_its_own_modules() -> None:
    """What checkpoints and tests copy must not hold compiled functions by value."""
    model = model_of()
    model.use(EAGER)
    copied = copy.deepcopy(model)
    assert json.dumps(list(copied.state_dict())) == json.dumps(list(model.state_dict()))
    assert isinstance(copied.layers[0].attention.dense, dense.Dense)
