"""Before they train: do other kernels for the dense parts give what our own modules give?

One layer and the loss run at the launch's real shape, three times: by our modules in float64, by
our modules as they train, and by the other kernels. Values and gradients of these may be as far
from the first as twice what our own are, or 1e-5; all as root mean squares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nsa.dense import leave, mean_loss
from nsa.model import Layer, NSALanguageModel
from nsa.rounding import Gap, error_of

_SEED = 20_240_917
# The first run of a CUDA graph is a rehearsal, the second records it, the third replays it.
_RUNS = 3

# A part of the model: a layer and what goes into the part, to what comes out of it.
Call = Callable[..., Iterable[Tensor]]


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
    layers = exact, own, other

    def enter(layer: Layer, x: Tensor) -> Iterable[Tensor]:
        return layer.attention.project(x, layer.attention_norm).named().values()

    def leaving(layer: Layer, x: Tensor, attended: Tensor) -> Iterable[Tensor]:
        tail = leave if dense is None or layer is not other else dense.leave
        return [tail(x, attended, layer.mlp_norm, layer.mlp)]

    def loss(layer: Layer, z: Tensor) -> Iterable[Tensor]:
        if layer is exact:  # `mean_loss` itself goes down to float32
            return [-z.log_softmax(-1).gather(-1, following[..., None]).mean()]
        return [(mean_loss if dense is None or layer is own else dense.loss)(z, following)]

    gaps = [
        _worst("enter", enter, (x,), layers, autocast),
        _worst("leave", leaving, (x, attended), layers, autocast),
        _worst("loss", loss, (logits,), layers, nullcontext),  # as the trainer takes it
    ]
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


def _worst(
    name: str,
    call: Call,
    inputs: tuple[Tensor, ...],
    layers: tuple[Layer, Layer, Layer],
    autocast: Callable[[], AbstractContextManager[object]],
) -> Gap:
    """The widest gap of one part, which `layers` compute exactly, as ours and as the others."""
    exact, own, other = layers
    truth = _run(call, exact, tuple(x.double() for x in inputs), nullcontext())
    ours = _run(call, own, inputs, autocast())
    for _ in range(_RUNS):
        theirs = _run(call, other, inputs, autocast())
    gaps = [
        Gap.twice(
            what=f"{name}, {of}",
            error=error_of(theirs[of], right).whole,
            ours=error_of(ours[of], right).whole,
        )
        for of, right in truth.items()
    ]
    return max(gaps, key=lambda gap: gap.beyond)


def _run(
    call: Call, layer: Layer, inputs: tuple[Tensor, ...], autocast: AbstractContextManager[object]
) -> dict[str, Tensor]:
    """Outputs, and gradients of their sum weighted by fixed numbers, by name."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with autocast:
        found = list(call(layer, *leaves))
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
