"""The layers of a model as CUDA graphs: recorded once, replayed in every micro-batch.

A layer is some hundred small kernels, which a host launches more slowly than a large GPU runs them.
A recording holds all launches of a layer's forward or backward pass, and a replay is one launch of
the same kernels on the same memory. torch records and replays (`torch.cuda.make_graphed_callables`,
made for this use under DDP); this module says when, and shows that the numbers are the same.

What watches a layer from Python (hooks, counted ranges, operator modes) would see nothing of a
replay. While anything watches, the layers run from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention.tracing import is_watched
from nsa.model import Layer, NSALanguageModel, Whole
from nsa.rounding import Gap, errors_of, widest

# What autograd calls the backward pass of a layer that was replayed.
REPLAYED_NODE = "GraphedBackward"
# Kernels choose their algorithms, and caches fill, in runs before the recording.
_REHEARSALS = 3
_SEED = 20_240_917
_LOSS = "loss"

Loss = Callable[[Tensor], Tensor]
Autocast = Callable[[], AbstractContextManager[object]]


class _Watched(nn.Module):
    """A layer that also gives what is read from it later: x to output, gates, chosen blocks.

    It enters autocast itself: torch records the backward pass where the recording is asked for, and
    no backward pass runs under autocast.
    """

    def __init__(self, layer: Layer, by: Whole | None, autocast: Autocast) -> None:
        super().__init__()
        self.layer, self.by, self.autocast = layer, by, autocast

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x [B,S,dim] to [B,S,dim], gates and blocks as the attention keeps them."""
        with self.autocast():
            out: Tensor = self.layer(x, by=self.by)
        return out, self.layer.attention.last_gates, self.layer.attention.last_blocks


class Recording:
    """All layers of a model, recorded for inputs [B,S,dim] of one shape and type."""

    def __init__(
        self, model: NSALanguageModel, tokens: tuple[int, int], autocast: Autocast
    ) -> None:
        self._layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        self._modules = [module for layer in self._layers for module in layer.modules()]
        device = model.embedding.weight.device
        generator = torch.Generator(device).manual_seed(_SEED)
        shape = (*tokens, model.cfg.attention.dim)
        # Each layer keeps its own input for its backward pass.
        inputs = [
            (torch.randn(shape, generator=generator, device=device, requires_grad=True),)
            for _ in self._layers
        ]
        self._shape, self._dtype = inputs[0][0].shape, inputs[0][0].dtype
        with autocast():
            self._half = _autocast_dtype(device.type)
        # A cast weight that autocast keeps would be the weight of the recording for ever.
        kept = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        parameters = [p for layer in self._layers for p in layer.parameters()]
        accumulate_anew(parameters)
        try:
            self._replayed: Any = torch.cuda.make_graphed_callables(
                tuple(_Watched(layer, model.compiled, autocast) for layer in self._layers),
                tuple(inputs),
                num_warmup_iters=_REHEARSALS,
            )
        finally:
            torch.set_autocast_cache_enabled(kept)
        accumulate_anew(parameters)
        # Replays read the rotations where they lay, also after a longer sequence made others.
        self._turns = [layer.attention._turns for layer in self._layers]

    def fits(self, x: Tensor) -> bool:
        """May the layers be replayed for x, or does it differ, or does something watch them?"""
        return (
            x.shape == self._shape
            and x.dtype == self._dtype
            and self._half == _autocast_dtype(x.device.type)
            and torch.is_grad_enabled()
            and not is_watched(self._modules)
        )

    def __call__(self, x: Tensor) -> Tensor | None:
        """Replay all layers where x fits."""
        if not self.fits(x):
            return None
        for layer, replayed in zip(self._layers, self._replayed, strict=True):
            x, gates, blocks = replayed(x)
            layer.attention.last_gates, layer.attention.last_blocks = gates.detach(), blocks
        return x


@torch.no_grad()
def accumulate_anew(parameters: Iterable[nn.Parameter]) -> None:
    """Let the next pass make the nodes that add to `.grad` on the stream on which it runs.

    A node belongs to the stream on which it was made. The passes of a recording have one of their
    own, and torch keeps these passes: without this, gradients are added on that stream for the rest
    of the launch, beside the backward pass. A gradient that DDP then moves into its bucket is freed
    while that stream has yet to write it, and its memory goes to the backward pass: sums were
    wrong, and a sort whose flags were overwritten waited for ever (benchmarks/results/h200.md).
    Before a recording, since CUDA refuses one that meets a node of another stream.
    """
    for parameter in parameters:
        # torch has no other way: a tensor of another type needs another node.
        there = parameter.data
        parameter.data = there.new_empty(0, dtype=torch.float64)
        parameter.data = there


def keep_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the gradients of a first micro-batch out of the memory that the next replay overwrites.

    Without it the gradients of a second micro-batch replace those of the first one, in silence
    (pytorch issues 96693, 146569 and 169545). Later ones are added to the first at once, and of a
    single one is done with before the next replay. All are copied together: one by one, the host
    would launch seven copies for each layer.
    """
    found = [(p, p.grad) for p in parameters if p.grad is not None]
    kept = [torch.empty_like(gradient) for _, gradient in found]
    torch._foreach_copy_(kept, [gradient for _, gradient in found])
    for (parameter, _), copy in zip(found, kept, strict=True):
        parameter.grad = copy


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def roundings(
    model: NSALanguageModel,
    loss: Loss,
    exact: Loss,
    tokens: Tensor,
    half: torch.dtype | None = None,
) -> dict[str, float]:
    """How far loss and gradients are from the same in float32, as shares.

    loss: mean loss of tokens [B, S+1], as it trains; exact: the same in float32; half: the type in
    which the former multiplies. The loss is one number, and near the right one by chance: its share
    is no less than what that type rounds a number by.
    """
    model.run_from_host(2)
    found = errors_of(_values(model, loss, tokens), _values(model, exact, tokens))
    roundoff = 0.0 if half is None else torch.finfo(half).eps / 2
    return found | {_LOSS: max(found[_LOSS], roundoff)}


def replay_gap(
    model: NSALanguageModel,
    loss: Loss,
    exact: Loss,
    tokens: tuple[int, int],
    half: torch.dtype | None = None,
) -> Gap:
    """Hold a replayed pass against the same pass launched by the host, loss and all gradients.

    A library may choose other kernels while it is recorded, so the two agree as the `roundings` of
    one sequence do. Other tokens are replayed in between, so that a replay that reads what lay
    there before is seen. tokens: B and S. Leaves no gradient.
    """
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(_SEED)
    shape, words = (2, tokens[0], tokens[1] + 1), model.cfg.vocab_size
    first, other = torch.randint(words, shape, generator=generator, device=device)
    rounding = roundings(model, loss, exact, first[:1], half)
    model.run_from_host()
    right = _values(model, loss, first)
    _values(model, loss, other)
    replayed = _values(model, loss, first)
    return widest(errors_of(replayed, right), rounding)


def _values(model: NSALanguageModel, loss: Loss, tokens: Tensor) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, by name; no view of a graph's memory."""
    parameters = dict(model.named_parameters())
    value = loss(tokens)
    grads = torch.autograd.grad(value, list(parameters.values()))
    named = zip(parameters, grads, strict=True)
    return {_LOSS: value.detach()} | {f"gradient of {n}": g.clone() for n, g in named}
