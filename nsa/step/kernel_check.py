"""Before they train: do other kernels give what our own modules give?

One layer and the loss run at the launch's real shape, three times: by our modules in float32 by
masks, without TF32, by our modules as they train, and by the other kernels. Values and gradients of
these may be as far from the first as twice what our own are, or 1e-5; all as root mean squares.

Other roundings choose other blocks where scores are nearly equal, and what such a query gives is
far off for that reason alone. So queries that do not all choose alike are counted, and left out of
the rest: a query's choice changes what is at its own place only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nsa.attention.selection import full_float32
from nsa.config import Way
from nsa.model import Layer, NSALanguageModel, Whole, mean_loss
from nsa.rounding import TIMES_OURS, Gap, error_of

_SEED = 20_240_917
# Of which part of the queries chance alone may make twice as many choose otherwise as of our own.
_FEW_CHOICES = 0.01

Autocast = Callable[[], AbstractContextManager[object]]
Loss = Callable[[Tensor, Tensor], Tensor]


def compare(
    model: NSALanguageModel,
    loss: Loss,
    *,
    tokens: tuple[int, int],
    autocast: Autocast,
    half: torch.dtype | None = None,
) -> list[Gap]:
    """The worst value or gradient of the first layer and of the loss, and who chooses otherwise.

    loss: in the place of `mean_loss`. tokens: B and S; half: the type in which logits leave the
    head under `autocast`. Uses no random state of the process and leaves no gradient.
    """
    device = model.embedding.weight.device
    x, logits = _numbers(model, tokens, device)
    gaps = [
        *_layers(model, x, autocast),
        _losses(loss, logits if half is None else logits.to(half)),
    ]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the comparison is no part of the training
    return gaps


def _layers(model: NSALanguageModel, x: Tensor, autocast: Autocast) -> list[Gap]:
    other: Layer = model.layers[0]  # type: ignore[assignment]
    way = other.attention.way
    exact = _Run(_ours(model, other, way.exact()), x, None, full_float32)
    own = _Run(_ours(model, other, way), x, None, autocast)
    theirs = _Run(other, x, model.compiled, autocast)
    off = [(run.blocks != exact.blocks).flatten(2).any(-1) for run in (own, theirs)]
    ours_off, theirs_off = (float(one.double().mean()) for one in off)
    choices = Gap(
        what="layer, choices of blocks",
        error=theirs_off,
        allowed=max(TIMES_OURS * ours_off, _FEW_CHOICES),
    )
    alike = ~(off[0] | off[1])
    with full_float32():
        truth = exact.values(alike)
    return [choices, _worst("layer", truth, own.values(alike), theirs.values(alike))]


class _Run:
    """One forward pass of a layer for x [B,S,dim], and from it what is compared."""

    def __init__(self, layer: Layer, x: Tensor, by: Whole | None, within: Autocast) -> None:
        self._leaves = {
            "input": x.detach().clone().requires_grad_(),
            **dict(layer.named_parameters()),
        }
        with within():
            self._out: Tensor = layer(self._leaves["input"], by=by)
        if layer.attention.last_blocks is None:
            raise RuntimeError("a layer keeps its blocks in every forward pass")
        self.blocks = layer.attention.last_blocks

    def values(self, alike: Tensor) -> dict[str, Tensor]:
        """Output and gradients of its weighted sum by name, of the queries alike [B,S]."""
        seen = alike[..., None]
        return {"value": self._out.detach() * seen} | _slopes(self._out, self._leaves, seen)


def _losses(loss: Loss, logits: Tensor) -> Gap:
    """The worst of the value and the gradient of the loss of logits [B,S,V]."""
    batch, seq_len, vocabulary = logits.shape
    # Cut from longer rows, as in a step: the same strides, and so the same compiled graph.
    rows = torch.arange(batch * (seq_len + 1), device=logits.device).view(batch, -1)
    following = (rows % vocabulary)[:, 1:]

    def exact(z: Tensor, of: Tensor) -> Tensor:
        return -z.log_softmax(-1).gather(-1, of[..., None]).mean()

    found = []
    for function, z in ((exact, logits.double()), (mean_loss, logits), (loss, logits)):
        leaf = z.detach().clone().requires_grad_()
        out = function(leaf, following)
        found.append({"value": out.detach()} | _slopes(out, {"logits": leaf}, 1.0))
    return _worst("loss", *found)


def _ours(model: NSALanguageModel, other: Layer, way: Way) -> Layer:
    """A copy of the layer as our own modules run it."""
    with torch.device("meta"):  # draws no random numbers
        layer = Layer(model.cfg)
    layer.to_empty(device=other.mlp_norm.weight.device)
    layer.load_state_dict(other.state_dict())
    layer.attention.way = way
    return layer


def _numbers(
    model: NSALanguageModel, tokens: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(_SEED)
    x, logits = (
        torch.randn(*tokens, width, generator=generator, device=device)
        for width in (model.cfg.attention.dim, model.cfg.vocab_size)
    )
    return x, logits


def _worst(
    name: str, truth: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> Gap:
    """The widest gap of one part, which was computed exactly, as ours and as the others."""
    gaps = [
        Gap.twice(
            what=f"{name}, {of}",
            error=error_of(theirs[of], right).whole,
            ours=error_of(ours[of], right).whole,
        )
        for of, right in truth.items()
    ]
    return max(gaps, key=lambda gap: gap.beyond)


def _slopes(out: Tensor, leaves: dict[str, Tensor], seen: Tensor | float) -> dict[str, Tensor]:
    """Gradients by name of the output's sum, weighted by fixed numbers where it is seen."""
    generator = torch.Generator(out.device).manual_seed(_SEED + 1)
    weights = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype) * seen
    grads = torch.autograd.grad(out, list(leaves.values()), weights)
    return {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
