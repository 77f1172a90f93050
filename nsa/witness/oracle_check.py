"""A launch's real first or last batch, at its real shape, against the oracle at a few positions.

The paths that train are proven on small shapes elsewhere. What this launch computes, with its
length, precision, device and kernels, is seen only here: inputs and outputs of every layer and of
the head are noted during one pass, then computed again in NumPy. Each rank looks at positions of a
row of its own, both drawn anew for each launch, so that no place is safe from it for long; of one
layer, drawn like them, it holds the gradients too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nsa.model import Layer, NSALanguageModel
from nsa.rounding import error_of
from nsa.witness import oracle
from nsa.witness.slope_check import slope_error

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
        errors: dict[str, list[float]] = {}
        for name in self._names():
            if name.endswith(".attention"):
                for what, value in self._layer(name.removesuffix(".attention"), at).items():
                    errors.setdefault(what, []).append(value)
        found |= {what: max(values) for what, values in errors.items()}
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
        x, blocks = _array(self.inputs[name]), self.blocks[f"{name}.attention"].cpu().numpy()
        y, attended = oracle.layer(cfg, own, x, positions=at, blocks=blocks[:, at])
        picked = oracle.judge_selection(cfg.attention, attended, blocks[:, at])
        got = _array(self.outputs[f"{name}.attention"])[:, at]
        noted = _array(self.gates[f"{name}.attention"].transpose(1, 2).flatten(2, 3))[:, at]
        added = _array(self.outputs[name])[:, at] - x[:, at]
        return {
            "attention": _share(got, attended.out),
            "gates": _share(*(g.reshape(1, len(at), -1) for g in (noted, attended.gates))),
            "layer": max(
                0.0, _share(added, y - x[:, at]) - _rounded_away(self.outputs[name], added)
            ),
            "blocks_illegal": float(picked.illegal),
            "blocks_shortfall": max(0.0, picked.shortfall) / _mean_score(attended.scores),
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
