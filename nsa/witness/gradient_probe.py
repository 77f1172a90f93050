"""One pass over a real batch that proves what no number of a step shows.

Before the first step, and once more after the last one, every rank runs a batch forward and
backward through the real wrapper and hook, with known numbers in the place of its gradients. What
comes out of the reduction tells whether every rank's share arrives, and how many bits of it. On the
way the pass notes which parameters got a gradient of their own, for how many positions the loss was
taken, and whether its gradient is that of cross entropy; every rank holds what its model computed
against the oracle. A trainer that accumulates does it here as well.

Beside it in the `proof`: how the weights began, and the text that the batch was made of.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from nsa.contract import WEIGHT_SIGNS
from nsa.data import Batch
from nsa.data.text import Gpt2Tokenizer
from nsa.layer import NSAAttention, columns
from nsa.model import NSALanguageModel
from nsa.rounding import or_null, plain_floats
from nsa.settings import DataSection
from nsa.step.engine import Engine
from nsa.witness.oracle_check import OracleCheck

# Each rank r sends (r + 1) times 1 plus these: bf16, whose steps are 2^-7 at 1, keeps the second,
# but no type of 8 bits does; fp16 keeps the third as well, and fp32 all.
_FINE = (0.0, 2.0**-5, 2.0**-9, 2.0**-14)
_WIRE = ("8 bits or fewer", "bf16", "fp16", "fp32")
# A difference has survived if it comes out within this share of itself: the coarse one also after
# the sums of many ranks were rounded to bf16.
_SURVIVED = (0.0, 0.5, 0.1, 0.1)
# Positions whose logits are looked at together.
_AT_ONCE = 1024
_LAYER_NUMBER = re.compile(r"^layers\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a parameter with one job. `group`: that job, the same in every layer."""

    group: str
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
            cuts[id(module.in_proj.weight)] = columns(module.cfg)
    for name, parameter in model.named_parameters():
        group = _LAYER_NUMBER.sub("", name).removesuffix(".weight")
        whole = {"": slice(None)}
        for part, rows in cuts.get(id(parameter), whole).items():
            yield Piece(
                group=f"attention.{part}" if part else group,
                parameter=parameter,
                rows=rows,
            )


def least_by_group(values: Sequence[tuple[Piece, float]]) -> dict[str, float]:
    """The smallest value among the pieces of each group: the layer that is worst off."""
    least: dict[str, float] = {}
    for piece, value in values:
        least[piece.group] = min(value, least.get(piece.group, value))
    return least


@dataclass(kw_only=True)
class _Seen:
    """What the hooks of the pass noted."""

    local: list[tuple[Piece, Tensor]] = field(default_factory=list)
    # How far what the micro-batch before left is from the numbers that it sent, of each parameter.
    kept: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None
    # Of the logits: the last micro-batch's, as the backward pass hands it on.
    gradient: Tensor | None = None


def probe_gradients(engine: Engine, batch: Batch, *, with_oracle: bool = True) -> dict[str, Any]:
    """Run the pass; the fields of the `proof` event. A collective of all ranks.

    with_oracle: hold the model against it, a third of a second for each layer at S=2048.
    Leaves no gradient, changes no parameter and does not touch the optimizer.
    """
    seen = _Seen()
    by_parameter = groupby(pieces(engine.model), key=lambda piece: id(piece.parameter))
    weight = float(engine.ranks.rank + 1)
    handles = [
        group[0].parameter.register_hook(partial(_swap, seen, group, weight))  # type: ignore[no-untyped-call]
        for group in (list(found) for _, found in by_parameter)
        if group[0].parameter.requires_grad
    ]
    handles.append(engine.model.head.register_forward_hook(partial(_keep_logits, seen)))
    spots = OracleCheck(
        model=engine.model,
        row=_row(engine, len(batch.tokens)),
        seed=_drawn(engine, batch),
        within=engine.autocast,
    )
    count = min(2, engine.plan.config.train.accumulate_grad_batches)
    try:
        # The way that a step goes, so that what goes wrong there goes wrong here.
        watch = spots.watch() if with_oracle else None
        loss = engine.gradients([batch] * count, watch)
    finally:
        for handle in handles:
            handle.remove()
    arrived = _arrived(engine, count)
    clipped = _clipped(engine)
    engine.optimizer.zero_grad(set_to_none=True)
    if engine.wrapped is not None and engine.wrapped.wire is not None:
        engine.wrapped.wire.take()
    return {
        "loss": float(loss),
        "positions": 0 if seen.gradient is None else int(seen.gradient.ne(0).any(-1).sum()),
        "own_gradient": plain_floats(least_by_group([(p, float(v)) for p, v in seen.local])),
        "kept": or_null(float(torch.stack(seen.kept).max()), digits=4) if seen.kept else None,
        **arrived,
        **clipped,
        "logit_gradient": _logit_gradient(
            seen, batch.tokens, float(engine.scaler.get_scale()) / count
        ),
        "oracle": spots.result() if with_oracle else None,
    }


def _row(engine: Engine, rows: int) -> int:
    """Another row for each rank where there are enough; each launch draws anew."""
    return (_number(f"{engine.plan.run_token}".encode()) + engine.ranks.rank) % rows


def _drawn(engine: Engine, batch: Batch) -> int:
    """What this rank's positions are drawn with: another number for each launch and batch."""
    words = f"{engine.plan.run_token} {engine.ranks.rank} ".encode()
    return _number(words + batch.tokens.cpu().numpy().tobytes())


def _number(words: bytes) -> int:
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "little")


def _swap(seen: _Seen, group: list[Piece], weight: float, gradient: Tensor) -> Tensor:
    """Note a parameter's own gradient, and hand on the known numbers instead."""
    for piece in group:
        seen.local.append((piece, piece.of(gradient).float().square().mean().sqrt()))
    sent = weight * _pattern(gradient)
    if (before := group[0].parameter.grad) is not None:
        seen.kept.append((before - sent).abs().max() / weight)
    return sent


def _pattern(like: Tensor) -> Tensor:
    fine = torch.tensor(_FINE, dtype=like.dtype, device=like.device)
    repeated = fine.repeat(-(-like.numel() // len(_FINE)))[: like.numel()]
    return (1.0 + repeated).view(like.shape)


def _keep_logits(seen: _Seen, _module: nn.Module, _inputs: Any, logits: Tensor) -> None:
    """A forward hook of the head that keeps the logits and the gradient that they get."""

    def keep(gradient: Tensor) -> None:
        seen.gradient = gradient.detach()

    seen.logits = logits.detach()
    logits.register_hook(keep)  # type: ignore[no-untyped-call]


def _logit_gradient(seen: _Seen, tokens: Tensor, factor: float) -> float | None:
    """Error of the logits' gradient as a share of what cross entropy has: softmax(z) less 1 at the
    next token, over the positions, times `factor`. Both as root mean squares. None where one is not
    finite, as under a gradient scaler that tried a factor too large.
    """
    if seen.logits is None or seen.gradient is None:
        return None
    z, found = seen.logits.flatten(0, 1), seen.gradient.flatten(0, 1)
    following = tokens[:, 1:].flatten().to(z.device)
    if len(z) != len(following):
        return None
    off, whole = 0.0, 0.0
    # In parts: a float32 copy of all logits of a large vocabulary is most of what a step holds.
    for part in torch.split(torch.arange(len(z), device=z.device), _AT_ONCE):
        wanted = z[part].float().softmax(-1)
        wanted[torch.arange(len(part)), following[part]] -= 1
        wanted *= factor / len(z)
        off += float((found[part].float() - wanted).square().sum())
        whole += float(wanted.square().sum())
    share = math.sqrt(off / whole) if whole > 0 else math.nan
    return or_null(share, digits=4)


def _arrived(engine: Engine, count: int) -> dict[str, Any]:
    """What the reduction made of the known numbers: their mean, and which details survived.

    `count`: how many micro-batches sent them.
    mean_low, mean_high: the extremes over all elements, as multiples of what the mean of all
    ranks' numbers is. wire: the widest type in which the details could have traveled.
    """
    size = engine.ranks.world_size
    expected = count * sum(range(1, size + 1)) / size
    lows, highs, details = [], [], []
    missing = []
    for name, parameter in engine.model.named_parameters():
        if parameter.grad is None:
            missing.append(name)
            continue
        ratio = (parameter.grad.float() / expected).flatten()
        error = ratio - _pattern(ratio)
        lows.append(error.min())
        highs.append(error.max())
        plain = ratio[0 :: len(_FINE)].median()
        for number in range(1, len(_FINE)):
            part = ratio[number :: len(_FINE)]
            if part.numel():
                details.append((number, (part - plain).median() / _FINE[number]))
    wire = _WIRE[0]
    for number in range(1, len(_FINE)):
        if _survived([v for n, v in details if n == number], _SURVIVED[number]):
            wire = _WIRE[number]
    return {
        "mean_low": 1.0 + float(torch.stack(lows).min()) if lows else 0.0,
        "mean_high": 1.0 + float(torch.stack(highs).max()) if highs else 0.0,
        "wire": wire,
        "missing": missing,
    }


def _survived(shares: list[Tensor], allowed: float) -> bool:
    """Did a detail come out at its own size in every parameter that holds it?"""
    return bool(shares) and all(abs(float(share) - 1) < allowed for share in shares)


def _clipped(engine: Engine) -> dict[str, float | None]:
    """Clips the known numbers: their norm as the trainer tells it, before it and after it.

    None under a gradient scaler, whose state a second unscaling in one step would damage.
    """
    if engine.scaler.is_enabled():
        return dict.fromkeys(("norm_told", "norm_before", "norm_after"))
    before = _norm(engine)
    told = float(engine.clip())
    return {"norm_told": told, "norm_before": before, "norm_after": _norm(engine)}


def _norm(engine: Engine) -> float:
    """Norm of all gradients, in float64."""
    grads = [p.grad for p in engine.model.parameters() if p.grad is not None]
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


@torch.no_grad()
def first_weights(model: NSALanguageModel) -> dict[str, dict[str, Any]]:
    """Of each group of the parameters, one number for each layer: the `weights` of the proof.

    n: elements of a piece; mean, rms, least, most; signs: those of the first `WEIGHT_SIGNS`
    elements as bits, in hexadecimal. A few passes over the parameters' memory, and no copy of them.
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
    norm = vector_norm(flat, dtype=torch.float64)
    rms = norm / flat.numel() ** 0.5
    mean = flat.sum(dtype=torch.float64) / flat.numel()
    told = torch.stack([mean, rms, flat.min(), flat.max()]).tolist()
    bits = "".join("1" if up else "0" for up in (flat[:WEIGHT_SIGNS] > 0).tolist())
    return {
        "n": flat.numel(),
        **{
            name: float(f"{value:.9g}")
            for name, value in zip(("mean", "rms", "least", "most"), told, strict=True)
        },
        "signs": f"{int(bits, 2):x}",
    }


_BETWEEN = {"byte": b"\0", "gpt2": b"<|endoftext|>"}


def text_again(batch: Batch, data: DataSection) -> dict[str, Any] | None:
    """The `text` of the proof: digests of the batch's text as read and as its tokens tell it.

    documents, bytes: of how many; apart: the first byte in which they differ, or None. None where
    the batch is not the first one of documents that are read from their beginning.
    """
    if not batch.texts:
        return None
    rows = batch.tokens.tolist()
    # Windows overlap by one token.
    tokens = [*rows[0], *(token for row in rows[1:] for token in row[1:])]
    between = _BETWEEN[data.tokenizer]
    if data.tokenizer == "byte":
        decoded = bytes(tokens)
        texts = [text.encode("utf-8", "replace").replace(b"\0", b"") for text in batch.texts]
    else:
        decoded = Gpt2Tokenizer(data.tokenizer_file).decode(tokens)
        # Half a surrogate pair is a replacement character to tiktoken.
        texts = [
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            for text in batch.texts
        ]
    read = (between + between.join(texts) + between)[: len(decoded)]
    pairs = enumerate(zip(read, decoded, strict=False))
    return {
        "documents": len(texts),
        "bytes": len(decoded),
        "read": hashlib.sha256(read).hexdigest(),
        "decoded": hashlib.sha256(decoded).hexdigest(),
        "apart": next((n for n, (one, other) in pairs if one != other), None),
    }
