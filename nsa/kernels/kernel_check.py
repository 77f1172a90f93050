"""Before they train: do other kernels for the dense parts give what our own modules give?

One layer and the loss run at the launch's real shape, three times: by our modules in float64, by
our modules as they train, and by the other kernels. Values and gradients of these may be as far
from the first as twice what our own are, or 1e-5; all as root mean squares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.dense import leave, mean_loss
from nsa.model import Layer, NSALanguageModel
from nsa.rounding import Gap, error_of

_SEED = 20_240_917
# The first run of a CUDA graph is a rehearsal, the second records it, the third replays it.
_RUNS = 3

Call = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A function of tensors and of a layer's parameters, and what goes into it."""

    name: str
    call: Callable[[Layer], Call]
    inputs: tuple[Tensor, ...]


def compare(
    model: NSALanguageModel,
    *,
    tokens: tuple[int, int],
    autocast: Callable[[], AbstractContextManager[object]],
    half: torch.dtype | None = None,
) -> list[Gap]:
    """The worst value or gradient of each part of the first layer, and of the loss.

    tokens: B and S; half: the type in which products leave their layer under `autocast`.
    Uses no random state of the process and leaves no gradient.
    """
    other: Layer = model.layers[0]  # type: ignore[assignment]
    own = _ours(model, other)
    exact = copy.deepcopy(own).double()
    device = own.mlp_norm.weight.device
    dense = other.dense
    x, attended, logits = _numbers(model, tokens, device)
    if half is not None:
        attended, logits = attended.to(half), logits.to(half)
    # Cut from longer rows, as in a step: the same strides, and so the same compiled graph.
    following = torch.arange(tokens[0] * (tokens[1] + 1), device=device).view(tokens[0], -1)
    following = (following % model.cfg.vocab_size)[:, 1:]
    loss = mean_loss if dense is None else dense.loss
    tail = leave if dense is None else dense.leave
    gaps = [
        _worst(_Part(name="enter", call=_enter, inputs=(x,)), exact, own, other, autocast),
        _worst(
            _Part(name="leave", call=lambda one: _leave(one, tail if one is other else leave),
                  inputs=(x, attended)),
            exact, own, other, autocast,
        ),
        _worst(
            _Part(name="loss", call=lambda one: _loss(loss if one is other else mean_loss,
                                                      following, exact=one is exact),
                  inputs=(logits,)),
            exact, own, other, nullcontext,  # as the trainer takes it: outside autocast
        ),
    ]  # fmt: skip
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the comparison is no part of the training
    return gaps


def _ours(model: NSALanguageModel, other: Layer) -> Layer:
    """A copy of the layer as our own modules run it."""
    with torch.device("meta"):  # draws no random numbers
        layer = Layer(model.cfg)
    layer.to_empty(device=other.mlp_norm.weight.device)
    layer.load_state_dict(other.state_dict())
    layer.attention.way = other.attention.way
    return layer


def _numbers(
    model: NSALanguageModel, tokens: tuple[int, int], device: torch.device
) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(_SEED)
    widths = (model.cfg.attention.dim, model.cfg.attention.dim, model.cfg.vocab_size)
    return tuple(torch.randn(*tokens, w, generator=generator, device=device) for w in widths)


def _enter(layer: Layer) -> Call:
    def call(x: Tensor) -> Sequence[Tensor]:
        return list(layer.attention.project(x, layer.attention_norm).named().values())

    return call


def _leave(layer: Layer, tail: Callable[..., Tensor]) -> Call:
    return lambda x, attended: [tail(x, attended, layer.mlp_norm, layer.mlp)]


def _loss(loss: Callable[[Tensor, Tensor], Tensor], following: Tensor, *, exact: bool) -> Call:
    if exact:  # `mean_loss` itself goes down to float32
        return lambda z: [-z.log_softmax(-1).gather(-1, following[..., None]).mean()]
    return lambda logits: [loss(logits, following)]


def _worst(
    part: _Part,
    exact: Layer,
    own: Layer,
    other: Layer,
    autocast: Callable[[], AbstractContextManager[object]],
) -> Gap:
    wide = tuple(tensor.double() for tensor in part.inputs)
    truth = _run(part.call(exact), wide, exact, nullcontext())
    ours = _run(part.call(own), part.inputs, own, autocast())
    for _ in range(_RUNS):
        theirs = _run(part.call(other), part.inputs, other, autocast())
    gaps = [
        Gap.twice(
            what=f"{part.name}, {name}",
            error=error_of(theirs[name], right).whole,
            ours=error_of(ours[name], right).whole,
        )
        for name, right in truth.items()
    ]
    return max(gaps, key=lambda gap: gap.beyond)


def _run(
    call: Call, inputs: Sequence[Tensor], layer: nn.Module, autocast: AbstractContextManager[object]
) -> dict[str, Tensor]:
    """Outputs, and gradients of their sum weighted by fixed numbers, by name."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with autocast:
        found = list(call(*leaves))
    named = {f"input {number}": leaf for number, leaf in enumerate(leaves)}
    named |= dict(layer.named_parameters())
    weights = [_weights(out) for out in found]
    grads = torch.autograd.grad(found, list(named.values()), weights, allow_unused=True)
    values = {f"value {number}": out.detach() for number, out in enumerate(found)}
    slopes = zip(named, grads, strict=True)
    return values | {f"gradient of {name}": grad for name, grad in slopes if grad is not None}


def _weights(out: Tensor) -> Tensor:
    generator = torch.Generator(out.device).manual_seed(_SEED + 1)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
