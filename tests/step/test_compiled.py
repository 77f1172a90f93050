"""Each layer through torch.compile: one graph, the same numbers, and none made in a timed step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.attention import sdpa
from nsa.config import ModelConfig, Way
from nsa.model import Layer, NSALanguageModel, mean_loss, whole
from nsa.rounding import errors_of, widest
from nsa.step import compiled
from nsa.step.compiled import Compiled, Compiling, compile_layers, count_compiled
from tests.step.small import SHAPE, model_of, tokens_of

# torch's own warnings while it compiles are not ours.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in ("The .grad attribute:UserWarning", ".*torch.jit.*:DeprecationWarning")
]
TOKENS = (2, 40)
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
# Of those of Triton tests/attention/test_mutants.py has the proof.
WAYS: dict[str, tuple[Way, Callable[[], AbstractContextManager[Any]]]] = {
    "cpu": (Way(), nullcontext),
    "masks": (Way(force_sdpa=True), nullcontext),
    "masks in bf16": (Way(force_sdpa=True), BF16),
    "softmax by hand": (Way(force_sdpa=True, use_flash=False), nullcontext),
    "plain loops": (Way(force_sdpa=True, selection_ranges="v1"), nullcontext),
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


# The keys' MLP comes before the ways part.
@pytest.mark.parametrize(
    ("name", "phi"),
    [
        *((name, "avg") for name in WAYS),
        ("cpu", "mlp"),
        ("masks", "mlp"),
    ],
)
def test_every_way_is_one_graph_and_the_same_numbers(name: str, phi: str) -> None:
    """`fullgraph` raises at a break; two layers share what is made of one."""
    way, within = WAYS[name]
    model, tokens = model_of(phi=phi), tokens_of()
    model.attend_by(way)
    if phi == "mlp":
        model.double()  # the gradients of some biases are nearly nothing, sums that cancel
    before = gradients(model, tokens, within)
    blocks = [one.last_blocks for one in model.attentions()]
    start, names = count_compiled(), list(model.state_dict())
    model.compiled = compile_layers("aot_eager").layer
    after = gradients(model, tokens, within)
    assert list(model.state_dict()) == names
    exactly = copy.deepcopy(model).double()
    exactly.compiled = None
    with exactly.exactly():
        exact = gradients(exactly, tokens)
    assert count_compiled() == Compiled(graphs=start.graphs + 1, breaks=start.breaks)
    assert before.keys() == after.keys()
    if within is not BF16:
        for one, chosen in zip(model.attentions(), blocks, strict=True):
            assert chosen is not None and one.last_blocks is not None
            assert torch.equal(one.last_blocks, chosen)
    gap = widest(errors_of(after, exact), errors_of(before, exact))
    assert not gap.too_wide, str(gap)


class Precision(TorchDispatchMode):
    """Under which policy each product of float32 in attention runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("bmm", "baddbmm_") and args[0].dtype is torch.float32:
            self.seen.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


# Triton's kernels are no products of torch; their own proofs hold their precision.
@pytest.mark.parametrize("by", [whole, "compiled"])
def test_what_chooses_blocks_has_all_of_float32(
    precision: None, monkeypatch: pytest.MonkeyPatch, by: Any
) -> None:
    """Where a process allows TF32: forward and backward of a layer, compiled or not."""
    torch.set_float32_matmul_precision("high")
    seen: list[str] = []
    for name in ("_forward", "_backward"):
        plain = getattr(sdpa, name)

        def watched(*args: Any, plain: Any = plain) -> Any:
            with Precision() as products:
                found = plain(*args)
            seen.extend(products.seen)
            return found

        monkeypatch.setattr(sdpa, name, watched)
    layer = Layer(ModelConfig(vocab_size=11, n_layers=1, attention=SHAPE))
    layer.attention.way = Way(force_sdpa=True)
    x = torch.randn(*TOKENS, SHAPE.dim, requires_grad=True)
    layer(x, by=compile_layers("aot_eager").layer if by == "compiled" else by).sum().backward()
    # Two products forward, five back.
    assert seen == ["highest"] * 7
    assert torch.get_float32_matmul_precision() == "high"


def test_only_timed_steps_are_spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's counts, one look after the other."""
    looks, written = [Compiled(graphs=count) for count in (3, 3, 4, 6)], []
    monkeypatch.setattr("nsa.step.compiled.count_compiled", lambda: looks.pop(0))
    beat = SimpleNamespace(write=lambda _, **told: written.append((told["where"], told["added"])))
    compiling = Compiling(cast("Any", beat))
    compiling.note("block")
    compiling.note("step", timed=True)
    assert compiling.in_steps == 0 and len(written) == 1
    compiling.note("step", timed=True)
    compiling.note("eval")
    assert compiling.in_steps == 1
    assert written == [("block", 3), ("step", 1), ("eval", 2)]
    compiling.begin_block()
    assert compiling.in_steps == 0


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

    masks = Way(force_sdpa=True)
    for way, flash in ((Way(), True), (masks, True), (masks, False), (Way(), True), (masks, False)):
        before = count_compiled().graphs
        model.attend_by(way)
        torch.backends.cuda.enable_flash_sdp(flash)
        try:
            gradients(model, tokens)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        made.append(count_compiled().graphs - before)
    assert made == [1, 1, 1, 0, 0]
