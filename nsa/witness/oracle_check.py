"""A launch's real first or last batch, at its real shape, against the oracle at a few positions.

The paths that train are proven on small shapes elsewhere. What this launch computes, with its
length, precision, device and kernels, is seen only here: inputs and outputs of every layer and of
the head are noted during one pass, then computed again in NumPy. Each rank looks at positions of a
row of its own, both drawn anew for each launch, so that no place is safe from it for long; of one
layer, drawn like them, it holds the gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from nsa.config import ModelConfig, NSAConfig
from nsa.model import Layer, NSALanguageModel
from nsa.rounding import error_of
from nsa.witness import oracle
from nsa.witness.equations import judge

# Positions of the sequence that are computed again: both ends, and one of each part between them.
POSITIONS = 8
# Rows of the head that a drawn step holds: those of a large vocabulary would be most of its time.
_WORDS = 256

Array = NDArray[np.float64]


@dataclass(kw_only=True)
class OracleCheck:
    """Inputs and outputs by module name, of one sequence of one pass.

    row: which of the batch. seed: what positions and layer are drawn with. within: what layers run
    in, such as autocast. only: the one layer that is watched, beside what lies between layers and
    the head; None for the whole model.
    """

    model: NSALanguageModel
    row: int = 0
    seed: int = 0
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    only: int | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    gates: dict[str, Tensor] = field(default_factory=dict)
    seams: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    back: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what goes into and comes out of the watched modules in the enclosed pass."""
        handles = [
            self.model.get_submodule(name).register_forward_hook(self._note(name))
            for name in self._names()
        ]
        handles += [
            self.model.get_submodule(name).register_forward_hook(self._seam(name))
            for name in (*self._chain(), "")
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _names(self) -> list[str]:
        numbers = range(self.model.cfg.n_layers) if self.only is None else [self.only]
        return [f"layers.{number}{part}" for number in numbers for part in ("", ".attention")]

    def _chain(self) -> list[str]:
        """Modules that hand the residual stream on, in order."""
        layers = [f"layers.{number}" for number in range(len(self.model.layers))]
        return ["embedding", *layers, "norm"]

    def _seam(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        """A hook that keeps what went into and came out of a module, at the positions only, and
        the gradients that come back there. "" is the model: the loss is taken of its logits."""

        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if name in self.seams:
                return
            at = torch.from_numpy(self._positions(output.shape[1])).to(output.device)
            ends = inputs[0], output
            self.seams[name] = inputs[0][self.row].detach()[at], output[self.row].detach()[at]
            for number, end in enumerate(ends):
                if end.requires_grad:
                    end.register_hook(partial(self._came_back, (name, number), at))  # type: ignore[no-untyped-call]

        return hook

    def _came_back(self, end: tuple[str, int], at: Tensor, gradient: Tensor) -> None:
        self.back[end] = gradient[self.row].detach()[at]

    def _note(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if name not in self.outputs:  # checkpointing runs a layer a second time
                of = slice(self.row, self.row + 1)
                self.inputs[name], self.outputs[name] = inputs[0][of].detach(), output[of].detach()
                if name.endswith(".attention"):
                    self.blocks[name] = module.last_blocks[of].detach()  # type: ignore[index]
                    self.gates[name] = module.last_gates[of].detach()  # type: ignore[index]

        return hook

    def result(self) -> dict[str, Any]:
        """Errors at the position that is furthest off, as shares of a root mean square.

        attention, gates, layer: of the worst layer; `gates` as its statistics read them, `layer`
        relative to what the layer adds.
        slope: of one layer's gradients, as `slope_error` says.
        layers: how many ran. seams: places where a module gets what the one before did not give, or
        gives back a gradient that the one before does not get.
        shape: of the model, which the oracle took, by the config's names.
        blocks_illegal: choices of blocks that the rules forbid. blocks_shortfall: the most by
        which a block that was taken scores below one that was left out, over the mean score.
        """
        at = self._positions(self.inputs["layers.0"].shape[1])
        found: dict[str, Any] = {"row": self.row, "positions": at.tolist(), "shape": self._shape()}
        found["embedding"] = self._embedding()
        layers = [self._layer(f"layers.{number}", at) for number in range(self.model.cfg.n_layers)]
        found |= {what: max(errors[what] for errors in layers) for what in layers[0]}
        found["logits"] = self._logits()
        found["slope"] = self._slope(at)
        found["layers"] = sum(name in self.seams for name in self._chain()[1:-1])
        found["seams"] = self._broken_seams()
        return {n: float(f"{v:.4g}") if isinstance(v, float) else v for n, v in found.items()}

    def step_errors(self, *, values: bool, slope: bool) -> dict[str, float]:
        """`seams`, as `result` counts them; with `values` also the largest error of the one layer
        that was watched (`layers`) and that of drawn words (`logits`), with `slope` its `slopes`.
        """
        name = f"layers.{self.only}"
        at = self._positions(self.inputs[name].shape[1])
        found: dict[str, float] = {}
        if values:
            off = self._layer(name, at).values()
            found["layers"] = max(off, key=lambda one: (one != one, one))
            found["logits"] = self._logits()
        if slope:
            found["slopes"] = self._slope(at)
        shown = {what: float(f"{off:.4g}") for what, off in found.items()}
        return {"seams": self._broken_seams(), **shown}

    def _shape(self) -> dict[str, Any]:
        cfg = self.model.cfg
        own = {name: getattr(cfg, name) for name in ("n_layers", "mlp_ratio", "tie_embeddings")}
        return own | asdict(cfg.attention)

    def _positions(self, seq_len: int) -> NDArray[np.int64]:
        bounds = np.linspace(0, seq_len - 1, POSITIONS - 1).round().astype(np.int64)
        drawn = np.random.default_rng(self.seed).integers(bounds[:-1], bounds[1:] + 1)
        return np.unique(np.concatenate([[0], drawn, [seq_len - 1]]))

    def _broken_seams(self) -> int:
        ran = [name for name in self._chain() if name in self.seams]
        return sum(
            not torch.equal(self.seams[one][1], self.seams[other][0])
            or not _alike(self.back.get((one, 1)), self.back.get((other, 0)))
            for one, other in pairwise(ran)
        )

    def _slope(self, at: NDArray[np.int64]) -> float:
        number = self.seed % self.model.cfg.n_layers if self.only is None else self.only
        layer: Layer = self.model.layers[number]  # type: ignore[assignment]
        x = self.inputs[f"layers.{number}"]
        return slope_error(layer, self.model.cfg, x, at, within=self.within, seed=self.seed)

    def _weights(self, prefix: str) -> dict[str, Array]:
        state = self.model.get_submodule(prefix).state_dict()
        return {name: _array(value) for name, value in state.items()}

    def _embedding(self) -> float:
        rows = self.model.embedding.weight.detach()[self.seams["embedding"][0]]
        return _share(_array(self.seams["layers.0"][0]), _array(rows))

    def _layer(self, name: str, at: NDArray[np.int64]) -> dict[str, float]:
        cfg, own = self.model.cfg, self._weights(name)
        x, blocks = _array(self.inputs[name]), self.blocks[f"{name}.attention"].cpu()[:, at]
        y, attended = oracle.layer(cfg, own, x, at=at, blocks=blocks.numpy())
        scores, places = torch.from_numpy(attended.scores), torch.from_numpy(at)[:, None]
        illegal, _, gaps = judge(blocks, scores, places, cfg.attention)
        got = _array(self.outputs[f"{name}.attention"])[:, at]
        noted = _array(self.gates[f"{name}.attention"].transpose(1, 2).flatten(2, 3))[:, at]
        added = _array(self.outputs[name])[:, at] - x[:, at]
        return {
            "attention": _share(got, attended.out),
            "gates": _share(*(g.reshape(1, len(at), -1) for g in (noted, attended.gates))),
            "layer": max(
                0.0, _share(added, y - x[:, at]) - _rounded_away(self.outputs[name], added)
            ),
            "blocks_illegal": float(illegal),
            "blocks_shortfall": float(gaps.clamp_min(0.0).max()) / _mean_score(attended.scores),
        }

    def _logits(self) -> float:
        cfg, state = self.model.cfg, self.model.state_dict()
        words = "embedding.weight" if cfg.tie_embeddings else "head.weight"
        drawn = np.arange(cfg.vocab_size)
        if self.only is not None and cfg.vocab_size > _WORDS:
            drawn = np.random.default_rng(self.seed).choice(drawn, _WORDS, replace=False)
        rows = torch.from_numpy(drawn)
        weights = {
            "norm.weight": _array(state["norm.weight"]),
            words: _array(state[words][rows.to(state[words].device)]),
        }
        x, logits = self.seams[f"layers.{cfg.n_layers - 1}"][1], self.seams[""][1]
        got = _array(logits[:, rows.to(logits.device)])
        return _share(got[None], oracle.head(cfg, weights, _array(x)[None]))


def _rounded_away(output: Tensor, added: Array) -> float:
    """What rounding of a large residual stream makes of what a layer adds to it."""
    unit = torch.finfo(output.dtype).eps
    whole, own = (float(np.square(x).mean()) for x in (_array(output), added))
    return unit * (whole / own) ** 0.5 if own > 0 else 0.0


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Under a gradient scaler that tried a factor too large both are NaN."""
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _array(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


def _mean_score(scores: Array) -> float:
    """Of the blocks that have one; 1 where none has."""
    return float(scores[scores > 0].mean()) if bool((scores > 0).any()) else 1.0


def _share(got: Array, wanted: Array) -> float:
    """Error [...,D] of the worst position over what was wanted, both as root mean squares."""
    return error_of(torch.from_numpy(got), torch.from_numpy(wanted)).place


Within = Callable[[], AbstractContextManager[object]]
# Directions, of which one may by chance be blind.
_DIRECTIONS = 2
# What moves most moves by this share of itself, or of the smallest size that matters to a layer;
# float64 keeps eight digits of the difference.
_FAR, _SMALL = 1e-4, 0.01
# So many times what one roundoff of everything changes, in so many tries, is rounding; nobody has
# to try where no more than so many roundoffs are off.
_ROUNDINGS, _REPEATS, _USUAL = 32, 3, 64
# Of the longest gradient: what is shorter counts as if it were so long.
_LEAST = 0.01
_INPUT, _PROJECTION = "input", "attention.in_proj.weight"


def slope_error(
    layer: Layer, cfg: ModelConfig, x: Tensor, at: NDArray[np.int64], *, within: Within, seed: int
) -> float:
    """How far the layer's gradients are off, for its input x [1,S,dim] and positions at [P].

    A step's own gradient is computed twice, but by the same layers: a backward pass that goes wrong
    agrees with itself. Here the layer runs once more on what it had for input, and the gradient of
    a weighted sum of its output is held against central differences of the same sum in NumPy: each
    piece (the input, every parameter, each part of the projection) goes a little along a random
    direction. With u a direction of independent normal numbers, <gradient, u> is normal, as wide as
    the gradient is long. Directions are divided by that length, so that pieces count alike: what is
    off by a share of one piece's gradient is off by that share, times a normal number, over the
    root of the number of pieces.

    Trained weights may make a layer so steep that roundings of the type alone move its gradient by
    more than any bound says. So it is computed a few times more, of numbers that differ by one
    roundoff each, and what is off is counted beyond a multiple of what that changes.

    NaN where a gradient is not finite. within: what the layer runs in. Leaves no gradient, and what
    the layer keeps of a pass as it was.
    """
    draw = np.random.default_rng(seed)
    weights = draw.standard_normal((len(at), x.shape[-1]))
    leaves = {name: one.detach() for name, one in ((_INPUT, x), *layer.named_parameters())}
    found, blocks = _gradients(layer, leaves, at, weights, within)
    tensors = {name: _array(tensor) for name, tensor in leaves.items()}
    start, gradients = (_pieces(cfg.attention, g) for g in (tensors, found))
    lengths = {name: float(np.linalg.norm(gradient)) for name, gradient in gradients.items()}
    if not all(map(math.isfinite, lengths.values())):
        return math.nan
    # What gets hardly any gradient, or none, has rounding for one: it counts for less.
    least = _LEAST * max(lengths.values())
    lengths = {name: max(length, least) for name, length in lengths.items()}

    def value(along: Mapping[str, Array], step: float) -> float:
        moved = _tensors(cfg.attention, {name: start[name] + step * along[name] for name in start})
        given = moved.pop(_INPUT)
        out, _ = oracle.layer(cfg, moved, given, at=at, blocks=blocks[:, at])
        return float((weights * (out - given[:, at])[0]).sum())

    off, ways = 0.0, []
    for _ in range(_DIRECTIONS):
        along = {n: draw.standard_normal(v.shape) / lengths[n] for n, v in start.items()}
        step = _FAR * min(max(_size(start[n]), _SMALL) / _size(along[n]) for n in start)
        slope = (value(along, step) - value(along, -step)) / (2 * step)
        off = max(off, abs(_along(gradients, along) - slope) / math.sqrt(len(start)))
        ways.append(along)
    unit = _roundoff(leaves[_INPUT], within)
    if off <= _USUAL * unit:
        return off
    gaps = []
    for number in range(_REPEATS):
        moved = _rounded(leaves, unit, seed + number)
        others = _pieces(cfg.attention, _gradients(layer, moved, at, weights, within)[0])
        gaps += [_along(gradients, along) - _along(others, along) for along in ways]
    rounding = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps) / len(start))
    return max(0.0, off - _ROUNDINGS * rounding)


def _along(gradients: Mapping[str, Array], direction: Mapping[str, Array]) -> float:
    return sum(float((gradients[name] * direction[name]).sum()) for name in direction)


def _pieces(cfg: NSAConfig, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors, the projection cut into what it makes."""
    whole = dict(tensors)
    projection = whole.pop(_PROJECTION)
    return whole | {p: projection[rows] for p, (rows, _, _) in oracle.in_proj_rows(cfg).items()}


def _tensors(cfg: NSAConfig, pieces: Mapping[str, Array]) -> dict[str, Array]:
    """`_pieces` put together again."""
    whole = dict(pieces)
    return whole | {_PROJECTION: np.concatenate([whole.pop(p) for p in oracle.in_proj_rows(cfg)])}


def _size(x: Array) -> float:
    """Root mean square."""
    return math.sqrt(float(np.square(x).mean()))


def _roundoff(x: Tensor, within: Within) -> float:
    """Of the type that products are computed in."""
    with within():
        half = torch.is_autocast_enabled(x.device.type)
        kind = torch.get_autocast_dtype(x.device.type) if half else x.dtype
    return torch.finfo(kind).eps / 2


def _rounded(leaves: Mapping[str, Tensor], unit: float, seed: int) -> dict[str, Tensor]:
    """Every number moved by about one roundoff."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return {
        name: leaf * (1 + unit * torch.randn(leaf.shape, generator=generator).to(leaf))
        for name, leaf in leaves.items()
    }


def _gradients(
    layer: Layer,
    tensors: Mapping[str, Tensor],
    at: NDArray[np.int64],
    weights: Array,
    within: Within,
) -> tuple[dict[str, Array], NDArray[np.int64]]:
    """Of the weighted sum of what the layer adds to x, by tensor; and the blocks it chose."""
    attention = layer.attention
    kept = attention.last_gates, attention.last_blocks
    # Tensors of the same memory: nobody hung a hook on these.
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    device = leaves[_INPUT].device
    places, wanted = (torch.from_numpy(one).to(device) for one in (at, weights))
    with torch.enable_grad(), within():
        own = {name: leaf for name, leaf in leaves.items() if name != _INPUT}
        out: Tensor = functional_call(layer, own, (leaves[_INPUT],))
    total = (out[0, places].double() * wanted).sum()
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    if attention.last_blocks is None:
        raise RuntimeError("a layer keeps its blocks in every forward pass")
    blocks = attention.last_blocks.cpu().numpy()
    attention.last_gates, attention.last_blocks = kept
    gradients = {name: _array(one) for name, one in zip(leaves, found, strict=True)}
    # The residual stream's own share would drown what the layer adds.
    gradients[_INPUT][0, at] -= weights
    return gradients, blocks
