"""Each layer through torch.compile: one graph, the same numbers, and none made in a timed step."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.attention.tracing import OperatorCount, count_ranges
from nsa.config import ModelConfig, NSAConfig, Way
from nsa.contract import Event
from nsa.kernels import compiled
from nsa.kernels.compiled import (
    Compiled,
    Compiling,
    Graphs,
    backward_nodes,
    compile_layers,
    count_compiled,
)
from nsa.kernels.kernel_check import compare
from nsa.launch import arms
from nsa.launch.arms import why_not
from nsa.model import Layer, NSALanguageModel, mean_loss, whole
from nsa.rounding import FLOAT32_SUMS, Gap, error_of
from nsa.toggles import parse_toggles
from tests.attention.flash_on_cpu import flash_on_cpu
from tests.train.launching import ROOT, environment

# torch's own warnings while it compiles are not ours.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in ("The .grad attribute:UserWarning", ".*torch.jit.*:DeprecationWarning")
]
SHAPE = NSAConfig(dim=16, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=6, d=3, l_sel=6, n_sel=3, w=7)
TOKENS = (2, 40)
BATCHED = {"NSA_COMPILE": "layer", "NSA_PREFILL_BATCHED": "1"}
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
# Of those of Triton the interpreter's process has the proof.
WAYS: dict[str, tuple[Way, Callable[[], AbstractContextManager[Any]]]] = {
    "cpu": (Way(), nullcontext),
    "cpu in bf16": (Way(), BF16),
    "plain loops on a cpu": (Way(selection_ranges="v1"), nullcontext),
    "masks": (Way(force_sdpa=True), nullcontext),
    "masks in bf16": (Way(force_sdpa=True), BF16),
    "softmax by hand": (Way(force_sdpa=True, use_flash=False), nullcontext),
    "plain loops": (Way(force_sdpa=True, selection_ranges="v1"), nullcontext),
    "varlen": (Way(force_sdpa=True, window="varlen"), BF16),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The compiler's own settings and graphs are the process's."""
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False),
        torch._functorch.config.patch(ban_recompute_materialized_backward=True),
    ):
        yield


def model_of(**changes: Any) -> NSALanguageModel:
    torch.manual_seed(0)
    shape = replace(SHAPE, phi=changes.pop("phi", "avg"))
    return NSALanguageModel(ModelConfig(vocab_size=11, n_layers=2, attention=shape, **changes))


def tokens_of(rows: int = 2, count: int = 41) -> Tensor:
    return torch.randint(11, (rows, count), generator=torch.Generator().manual_seed(1))


def gradients(
    model: NSALanguageModel,
    tokens: Tensor,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    model.zero_grad()
    with within():
        logits = model(tokens[:, :-1])
    loss = mean_loss(logits, tokens[:, 1:])
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "gates": model.gate_numbers()} | found


@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_one_graph_and_the_same_numbers(name: str, phi: str) -> None:
    """`fullgraph` raises at a break; two layers share what is made of one."""
    if phi == "mlp" and name not in ("cpu", "masks"):
        pytest.skip("the keys' MLP comes before the ways part")
    way, within = WAYS[name]
    model, tokens = model_of(phi=phi), tokens_of()
    model.attend_by(way)
    if phi == "mlp":
        model.double()  # the gradients of some biases are nearly nothing, sums that cancel
    with flash_on_cpu() if way.window == "varlen" else nullcontext():
        before = gradients(model, tokens, within)
        blocks = [one.last_blocks for one in model.attentions()]
        start = count_compiled()
        model.compiled = compile_layers("aot_eager").layer
        after = gradients(model, tokens, within)
    exactly = copy.deepcopy(model).double()
    exactly.compiled = None
    exactly.attend_by(way.exact())
    exact = gradients(exactly, tokens)
    assert count_compiled() == Compiled(graphs=start.graphs + 1, breaks=start.breaks)
    assert before.keys() == after.keys()
    if within is not BF16:
        for one, chosen in zip(model.attentions(), blocks, strict=True):
            assert chosen is not None and one.last_blocks is not None
            assert torch.equal(one.last_blocks, chosen)
    for what, right in exact.items():
        ours, theirs = (error_of(found[what], right).whole for found in (before, after))
        gap = Gap.twice(what=what, error=theirs, ours=ours)
        assert not gap.too_wide, str(gap)


class _Products(TorchDispatchMode):
    """Under which policy each product of float32 in attention runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("bmm", "baddbmm_"):
            self.seen.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("defect", [False, True])
def test_what_chooses_blocks_has_all_of_float32(
    defect: bool, tf32: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a process allows TF32: forward and backward of the compiled layer."""
    from nsa.attention import compressed

    if defect:  # made to fail on purpose: nothing asks for more
        monkeypatch.setattr(compressed, "full_float32", nullcontext)
    seen: list[str] = []
    for name in ("_forward", "_backward"):
        plain = getattr(compressed, name)

        def watched(*args: Any, plain: Any = plain) -> Any:
            with _Products() as products:
                found = plain(*args)
            seen.extend(products.seen)
            return found

        monkeypatch.setattr(compressed, name, watched)
    layer = Layer(ModelConfig(vocab_size=11, n_layers=1, attention=SHAPE))
    layer.attention.way = Way(force_sdpa=True)
    x = torch.randn(*TOKENS, SHAPE.dim, requires_grad=True)
    layer(x, by=compile_layers("aot_eager").layer).sum().backward()
    # Two products forward, five back.
    assert seen == ["high" if defect else "highest"] * 7
    assert torch.get_float32_matmul_precision() == "high"


def kept(seq_len: int) -> int:
    """Bytes that a compiled layer holds for its backward pass, cut as inductor cuts it."""
    shape = NSAConfig(
        dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, l=32, d=16, l_sel=64, n_sel=3, w=16
    )
    layer = Layer(ModelConfig(vocab_size=11, n_layers=1, attention=shape))
    layer.attention.way = Way(force_sdpa=True)
    x = torch.randn(1, seq_len, shape.dim, requires_grad=True)
    out = layer(x, by=compile_layers("aot_eager_decomp_partition").layer)
    saved: tuple[Tensor, ...] = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    return sum(one.untyped_storage().nbytes() for one in saved)


def test_no_mask_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config

    short, long = kept(512), kept(1024)
    assert long < 2.1 * short
    with monkeypatch.context() as patch:
        # Made to fail on purpose: the compiler's own rule.
        real = compiled.compile_layers

        def as_it_likes(backend: str) -> Graphs:
            found = real(backend)
            torch._functorch.config.ban_recompute_materialized_backward = True
            return found

        patch.setitem(globals(), "compile_layers", as_it_likes)
        torch._dynamo.reset()
        assert kept(1024) > 2 * long


class TestWhatIsWatched:
    """By hooks, counts and modes, which see nothing of a graph: then the modules run."""

    @pytest.fixture
    def model(self) -> NSALanguageModel:
        found = model_of()
        self.ran = 0

        def noting(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
            self.ran += 1
            return whole(*args)

        found.compiled = noting
        return found

    def ran_in(self, model: NSALanguageModel) -> int:
        before = self.ran
        model(tokens_of()[:, :-1])
        return self.ran - before

    def test_a_plain_pass_is_compiled(self, model: NSALanguageModel) -> None:
        assert self.ran_in(model) == 2
        assert self.ran_in(model.eval()) == 2

    @pytest.mark.parametrize("of", ["layers.1.attention", "layers.0.mlp.down"])
    def test_a_hook_inside_of_a_layer_is_called(self, model: NSALanguageModel, of: str) -> None:
        seen: list[Any] = []
        handle = model.get_submodule(of).register_forward_hook(lambda *_: seen.append(1))
        assert self.ran_in(model) == 0 and len(seen) == 1
        handle.remove()
        assert self.ran_in(model) == 2
        back = model.get_submodule(of).register_full_backward_hook(lambda *_: None)
        assert self.ran_in(model) == 0
        back.remove()

    def test_a_layers_own_hook_is_called_either_way(self, model: NSALanguageModel) -> None:
        seen: list[Any] = []
        model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        assert self.ran_in(model) == 2 and len(seen) == 1

    def test_counts_and_modes(self, model: NSALanguageModel) -> None:
        with count_ranges() as counts:
            assert self.ran_in(model) == 0
        assert counts.entered
        with OperatorCount():
            assert self.ran_in(model) == 0

    def test_a_pass_that_is_wanted_from_the_host(self, model: NSALanguageModel) -> None:
        model.run_from_host(2)
        assert [self.ran_in(model) for _ in range(3)] == [0, 0, 2]

    def test_recomputation_goes_the_way_that_the_pass_went(self) -> None:
        """A count ends before the backward pass: another way would save other tensors."""
        model = model_of(gradient_checkpointing=True)
        ran: list[bool] = []
        model.compiled = lambda *args: (ran.append(True), whole(*args))[1]  # type: ignore[func-returns-value]
        with count_ranges():
            loss = model(tokens_of()).sum()
        loss.backward()
        assert not ran
        model(tokens_of()).sum().backward()
        assert len(ran) == 4


def _no_rotation(layer: Layer, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    still = torch.stack((torch.ones_like(turns[..., 0]), torch.zeros_like(turns[..., 0])), -1)
    return whole(layer, x, still)


class _WrongSlope(torch.autograd.Function):
    """The right value, and a gradient that is off by a thousandth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


def _wrong_slope(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, gates, blocks = whole(*given)
    return _WrongSlope.apply(out), gates, blocks


def _other_choice(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of one query in fifty; what it gives is not looked at."""
    out, gates, blocks = whole(*given)
    changed = blocks.clone()
    changed[:, ::50] = -1
    return out, gates, changed


Defect = tuple[Callable[..., Any], Callable[..., Tensor], str]
DEFECTS: dict[str, Defect] = {
    "none": (whole, mean_loss, ""),
    "no rotation": (_no_rotation, mean_loss, "layer"),
    "wrong gradient": (_wrong_slope, mean_loss, "layer"),
    "other blocks": (_other_choice, mean_loss, "layer"),
    "sum for mean": (whole, lambda z, t: mean_loss(z, t) * t.numel(), "loss"),
    "not finite": (whole, lambda z, t: mean_loss(z, t) * torch.nan, "loss"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_other_numbers_are_noticed_before_a_step(defect: str) -> None:
    model = model_of()
    model.compiled, loss, part = DEFECTS[defect]
    random = torch.get_rng_state()
    gaps = compare(model, loss, tokens=(2, 50), autocast=nullcontext)
    assert {gap.what.split(",")[0] for gap in gaps if gap.too_wide} == ({part} if part else set())
    if defect == "other blocks":
        assert [gap.what for gap in gaps if gap.too_wide] == ["layer, choices of blocks"]
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
        (BATCHED, "cuda", "the package triton is not installed"),
        (BATCHED, "cpu", "no C++ compiler here (g++, clang++, c++)"),
        ({"NSA_COMPILE": "layer"}, "cuda", "token by token, a graph would hold every token; set"),
        ({"NSA_LIGER": "1"}, "cpu", "need a CUDA device, this is cpu; set it to 0"),
        ({"NSA_LIGER": "1"}, "auto", "the package liger-kernel is not installed; pip install"),
        (BATCHED, "auto", None),
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


# -- the real compiler -----------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_is_what_our_modules_give() -> None:
    """Values, gradients, one graph for all layers, names of parameters; and what makes more."""
    model, tokens = model_of(), tokens_of()
    names = list(model.state_dict())
    before = gradients(model, tokens)
    start = count_compiled().graphs
    graphs = compile_layers()
    model.compiled = graphs.layer

    def loss(rows: Tensor) -> Tensor:
        return graphs.loss(model(rows[:, :-1]), rows[:, 1:])

    first = loss(tokens)
    assert backward_nodes(first)[compiled.COMPILED_NODE] == 2 + 1
    model.zero_grad()
    first.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert error_of(parameter.grad, before[name]).whole < FLOAT32_SUMS, name
    assert count_compiled().graphs == start + 2, "two layers share their graph"
    gaps = compare(model, graphs.loss, tokens=TOKENS, autocast=nullcontext)
    assert not any(gap.too_wide for gap in gaps)
    assert count_compiled() == Compiled(graphs=start + 2)
    assert list(model.state_dict()) == names
    again = model_of(gradient_checkpointing=True)
    again.compiled = graphs.layer
    recomputed = gradients(again, tokens)
    for name, gradient in before.items():
        assert error_of(recomputed[name], gradient).whole < FLOAT32_SUMS, name
    assert count_compiled().graphs == start + 2, "recomputation runs the same graph"
    loss(tokens[:, :31])
    assert count_compiled().graphs == start + 4, "another length: each function anew"


def test_more_graphs_than_can_be_meant_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MOST_GRAPHS", 1)
    graphs = compile_layers("aot_eager")
    logits = torch.randn(1, 4, 11)
    graphs.loss(logits, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(Exception, match="fail_on_recompile_limit_hit"):
        graphs.loss(logits[:, :3], torch.zeros(1, 3, dtype=torch.int64))


def test_arms_take_turns_without_a_new_graph() -> None:
    """A way, and the kernels that SDPA may take, have a graph each, to which a block comes back."""
    model, tokens = model_of(), tokens_of()
    model.compiled = compile_layers("aot_eager").layer
    made: list[int] = []

    def run(way: Way, *, flash: bool = True) -> None:
        before = count_compiled().graphs
        model.attend_by(way)
        torch.backends.cuda.enable_flash_sdp(flash)
        try:
            gradients(model, tokens)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        made.append(count_compiled().graphs - before)

    masks = Way(force_sdpa=True)
    for way, flash in ((Way(), True), (masks, True), (masks, False), (Way(), True), (masks, False)):
        run(way, flash=flash)
    assert made == [1, 1, 1, 0, 0]


def test_the_kernels_of_triton_are_one_graph_too() -> None:
    """In Triton's interpreter, which a process chooses when it begins."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.compiled_in_interpreter"],
        cwd=ROOT,
        env={**environment({}), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["graphs"] == 1 and found["breaks"] == 0 and found["blocks"] is True
    assert found["wide"] == []
    assert found["operators"] >= 10


def test_a_copy_of_the_model_has_the_same_names() -> None:
    """What checkpoints and tests copy must not hold a compiled function by value."""
    model = model_of()
    model.compiled = whole
    copied = copy.deepcopy(model)
    assert list(copied.state_dict()) == list(model.state_dict())
    assert copied.compiled is whole
