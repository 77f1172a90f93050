"""Second sources for what the trainer says: tokens where they are embedded, parameters by group.

The CSV tells what the loop believes. Here the same facts are taken where they come about, so that
a reader can hold one against the other.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nsa.contract import WEIGHT_CUTS, WEIGHT_SIGNS
from nsa.data import Batch
from nsa.model import Columns, NSAAttention, NSALanguageModel

# Of each piece of the parameters so many elements are remembered, evenly spaced.
_SAMPLED = 2048
_WORD = 1 << 64
_LAYER_NUMBER = re.compile(r"^layers\.\d+\.")


def batch_digest(tokens: Tensor) -> int:
    """A 64-bit number for the rows of tokens [B, S+1], whatever their order.

    It is the sum of the rows' digests, so those of several ranks add up to that of one rank that
    reads all their rows.
    """
    rows = (hashlib.blake2b(row.tobytes(), digest_size=8) for row in tokens.numpy())
    return sum(int.from_bytes(row.digest(), "little") for row in rows) % _WORD


class TokenMeter:
    """Counts and sums the tokens that enter the embedding, beside those that were fetched."""

    def __init__(self, model: NSALanguageModel) -> None:
        self._counting, self._evaluating = False, False
        self._look: Callable[[], None] | None = None
        self._embedded, self._digest = 0, 0
        self._fetched_sum = 0
        self._embedded_sum: Tensor | None = None
        model.embedding.register_forward_pre_hook(self._see)

    def begin(self, batches: Sequence[Batch]) -> None:
        """A step begins with these micro-batches."""
        self._counting, self._embedded, self._digest = True, 0, 0
        for batch in batches:
            self._add(batch.tokens)
            self._fetched_sum += int(batch.tokens[:, :-1].sum())

    def passing(
        self, batches: Iterable[Tensor], look: Callable[[], None] | None = None
    ) -> Iterator[Tensor]:
        """These held-out batches, digested and counted as they go by; `look`: once in each."""
        self._evaluating, self._embedded, self._digest = True, 0, 0
        self._look = look
        for tokens in batches:
            self._add(tokens)
            yield tokens
        self._evaluating = False

    def passed(self) -> dict[str, int | str]:
        """The held-out batches went by: how many tokens of them were embedded, and their digest."""
        return {"embedded": self._embedded, "data": self._digest_text()}

    def _add(self, tokens: Tensor) -> None:
        self._digest = (self._digest + batch_digest(tokens)) % _WORD

    def _digest_text(self) -> str:
        return f"{self._digest:016x}"

    def take(self) -> dict[str, int | str]:
        """The step is over: tokens embedded in it, and the digest of what was fetched for it."""
        self._counting = False
        return {"embedded": self._embedded, "data": self._digest_text()}

    def sums(self) -> dict[str, int]:
        """Sums of all tokens of the launch, as fetched and as embedded. Synchronizes."""
        embedded = 0 if self._embedded_sum is None else int(self._embedded_sum)
        return {"fetched_sum": self._fetched_sum, "embedded_sum": embedded}

    def _see(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tokens = inputs[0]
        if self._evaluating:
            self._embedded += tokens.numel()
            if self._look is not None:
                self._look()
            return
        if not (self._counting and torch.is_grad_enabled()):
            return
        self._embedded += tokens.numel()
        total = tokens.sum()
        self._embedded_sum = total if self._embedded_sum is None else self._embedded_sum + total


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a parameter with one job. `group`: that job, the same in every layer."""

    group: str
    name: str
    parameter: nn.Parameter
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor shaped like the parameter."""
        return tensor[self.rows]


def pieces(model: NSALanguageModel) -> Iterator[Piece]:
    """Every parameter once, the attention's one projection cut into what it makes."""
    cuts: dict[int, dict[str, slice]] = {}
    for module in model.modules():
        if isinstance(module, NSAAttention):
            cuts[id(module.in_proj.weight)] = Columns(cfg=module.cfg).slices
    for name, parameter in model.named_parameters():
        group = _LAYER_NUMBER.sub("", name).removesuffix(".weight")
        whole = {"": slice(None)}
        for part, rows in cuts.get(id(parameter), whole).items():
            yield Piece(
                group=f"attention.{part}" if part else group,
                name=f"{name}[{part}]" if part else name,
                parameter=parameter,
                rows=rows,
            )


def least_by_group(values: Sequence[tuple[Piece, float]]) -> dict[str, float]:
    """The smallest value among the pieces of each group: the layer that is worst off."""
    least: dict[str, float] = {}
    for piece, value in values:
        least[piece.group] = min(value, least.get(piece.group, value))
    return least


class Movement:
    """How far the parameters moved since this was made, from a sample of every piece."""

    def __init__(self, model: NSALanguageModel) -> None:
        self._start = [(piece, _sample(piece)) for piece in pieces(model)]

    def by_group(self) -> dict[str, float]:
        """Root mean square of the change, of the piece that moved least in each group."""
        changes = [(p, (_sample(p) - before).square().mean().sqrt()) for p, before in self._start]
        return least_by_group([(piece, float(change)) for piece, change in changes])


def _sample(piece: Piece) -> Tensor:
    flat = piece.of(piece.parameter.detach()).flatten()
    stride = max(1, flat.numel() // _SAMPLED)
    return flat[::stride].double().clone()


def or_null(number: float, digits: int = 17) -> float | None:
    """The number to so many digits, for a line that has no NaN: None where it is not finite."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


def plain_floats(values: dict[str, float]) -> dict[str, Any]:
    """Rounded to six digits, for a line that people may read."""
    return {name: float(f"{value:.6g}") for name, value in values.items()}


@torch.no_grad()
def first_weights(model: NSALanguageModel) -> dict[str, dict[str, Any]]:
    """Of each group of the parameters, one number for each layer: the `weights` of the proof.

    n: elements of a piece; mean, rms, least, most; below: how many are at most `WEIGHT_CUTS` times
    the rms; signs: those of the first `WEIGHT_SIGNS` elements as bits, in hexadecimal. Five passes
    over the parameters' memory or so, and no copy of them.
    """
    groups: dict[str, dict[str, Any]] = {}
    for piece in pieces(model):
        told = _numbers(piece.of(piece.parameter.detach()).flatten())
        group = groups.setdefault(piece.group, {name: [] for name in told})
        for name, value in told.items():
            group[name].append(value)
    return groups


def _numbers(flat: Tensor) -> dict[str, Any]:
    # Sums in float64, but no float64 copy: an embedding's would be the most that a step holds.
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    rms = norm / flat.numel() ** 0.5
    mean = flat.sum(dtype=torch.float64) / flat.numel()
    below = torch.stack([(flat <= cut * rms).sum() for cut in WEIGHT_CUTS])
    told = torch.stack([mean, rms, flat.min(), flat.max()]).tolist()
    bits = "".join("1" if up else "0" for up in (flat[:WEIGHT_SIGNS] > 0).tolist())
    return {
        "n": flat.numel(),
        **{
            name: float(f"{value:.9g}")
            for name, value in zip(("mean", "rms", "least", "most"), told, strict=True)
        },
        "below": below.tolist(),
        "signs": f"{int(bits, 2):x}",
    }


def updates(optimizer: Optimizer) -> list[int]:
    """Fewest and most updates of a parameter, as the optimizer itself counts them."""
    counts = [int(entry["step"]) for entry in optimizer.state.values()]
    return [min(counts), max(counts)] if counts else [0, 0]
