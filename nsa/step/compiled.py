"""Layers and the loss through torch.compile: made, counted, and held against our own modules.

The only module that knows names inside torch's compiler. They are those of torch 2.13.

Before they train (`compare`) one layer and the loss run at the launch's real shape, three times: by
our modules in float32 by masks, without TF32, by our modules as they train, and by the compiler's.
Values and gradients of these may be as far from the first as twice what our own are, or 1e-5; all
as root mean squares.

Other roundings choose other blocks where scores are nearly equal, and what such a query gives is
far off for that reason alone. So queries that do not all choose alike are counted, and left out of
the rest: a query's choice changes what is at its own place only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.attention.selection import full_float32
from nsa.contract import Event
from nsa.launch.envfile import sdpa_kernels
from nsa.launch.output import Heartbeat
from nsa.model import Layer, NSALanguageModel, Whole, mean_loss, whole
from nsa.rounding import TIMES_OURS, Gap, errors_of, widest
from nsa.settings import ConfigError


class Refused(ConfigError):
    """A toggle of how the layers run cannot be put in force here; says why."""


# What autograd calls the backward pass of one call of a compiled function.
COMPILED_NODE = "CompiledFunctionBackward"
# Compiled calls of one forward pass beside one of each layer: the loss.
CALLS_BESIDE = 1
# More graphs of one function than this are a mistake: eight ways of attention that arms take turns
# in, each with and without gradients.
_MOST_GRAPHS = 16


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """What runs a layer, all layers by the same graph, and what runs `mean_loss`."""

    layer: Whole
    loss: Callable[[Tensor, Tensor], Tensor]


def compile_layers(backend: str | Callable[..., Any] = "inductor") -> Graphs:
    """`whole` and `mean_loss` through torch.compile, each as one graph, forward and backward.

    Nothing is compiled before the first call. A graph break, and more graphs of a function than can
    be meant, raise instead of running eagerly.
    """
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # DDP calls the functions from inside its own forward pass; cutting them at its buckets, as
    # torch does by default, helps only where the whole model is one graph.
    torch._dynamo.config.optimize_ddp = False
    # A pool of compiling processes would be children of the rank that nobody waits for.
    torch._inductor.config.compile_threads = 1
    # Masks are made again for the backward pass, not kept: they grow with the square of the length.
    torch._functorch.config.ban_recompute_materialized_backward = False
    how: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
    layer, loss = torch.compile(_layer, **how), torch.compile(mean_loss, **how)

    def run(one: Layer, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # SDPA chooses its kernel while it is compiled.
        allowed = " ".join(name for name, may in sdpa_kernels().items() if may)
        return layer(one, x, turns, allowed)

    return Graphs(layer=run, loss=loss)


def _layer(layer: Layer, x: Tensor, turns: Tensor, allowed: str) -> tuple[Tensor, Tensor, Tensor]:
    """`whole`, of which there is another graph wherever SDPA may take other kernels."""
    if not allowed:  # what is not read makes no other graph
        raise Refused("SDPA may take no kernel")
    return whole(layer, x, turns)


class Compiled(NamedTuple):
    """Since the process began: graphs made, and breaks."""

    graphs: int = 0
    breaks: int = 0


def count_compiled() -> Compiled:
    """What torch's compiler has done so far; zeros where it was never loaded."""
    if "torch._dynamo.utils" not in sys.modules:
        return Compiled()
    from torch._dynamo.utils import counters

    return Compiled(
        graphs=int(counters["stats"]["unique_graphs"]),
        breaks=sum(counters["graph_break"].values()),
    )


def backward_nodes(loss: Tensor) -> Counter[str]:
    """The names of all nodes of the loss's graph: autograd's own account of what ran forward."""
    names: Counter[str] = Counter()
    todo: list[Any] = [loss.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        names[node.name()] += 1
        below = {next_node for next_node, _ in node.next_functions} - seen
        seen |= below
        todo += below
    return names


class Compiling:
    """Holds the compiler's counts against those at the last look, and writes what was added.

    `in_steps`: graphs that were made in a block's timed steps: after its warm-up and after its
    toggles were judged.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._last = Compiled()
        self.in_steps = 0

    def begin_block(self) -> None:
        """A block's steps begin."""
        self.in_steps = 0

    def note(self, where: str, *, timed: bool = False) -> None:
        """Something has just run: `where` it was, and whether its time is measured."""
        now = count_compiled()
        if now == self._last:
            return
        added = now.graphs - self._last.graphs
        self._last = now
        if timed:
            self.in_steps += added
        self._heartbeat.write(
            Event.COMPILED, where=where, timed=timed, added=added, **now._asdict()
        )


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
    generator = torch.Generator(device).manual_seed(_SEED)
    x, logits = (
        torch.randn(*tokens, width, generator=generator, device=device)
        for width in (model.cfg.attention.dim, model.cfg.vocab_size)
    )
    gaps = [
        *_layers(model, x, autocast),
        _losses(loss, logits if half is None else logits.to(half)),
    ]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the comparison is no part of the training
    return gaps


def _layers(model: NSALanguageModel, x: Tensor, autocast: Autocast) -> list[Gap]:
    layer: Layer = model.layers[0]  # type: ignore[assignment]
    with model.exactly():
        exact = _Run(layer, x, None, full_float32)
    own, theirs = (_Run(layer, x, by, autocast) for by in (None, model.compiled))
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
    ours, others = (errors_of(run.values(alike), truth) for run in (own, theirs))
    return [choices, widest(others, ours, of="layer, ")]


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

    def values(function: Loss, z: Tensor) -> dict[str, Tensor]:
        leaf = z.detach().clone().requires_grad_()
        out = function(leaf, following)
        return {"value": out.detach()} | _slopes(out, {"logits": leaf}, 1.0)

    truth = values(exact, logits.double())
    ours, others = (errors_of(values(one, logits), truth) for one in (mean_loss, loss))
    return widest(others, ours, of="loss, ")


def _slopes(out: Tensor, leaves: dict[str, Tensor], seen: Tensor | float) -> dict[str, Tensor]:
    """Gradients by name of the output's sum, weighted by fixed numbers where it is seen."""
    generator = torch.Generator(out.device).manual_seed(_SEED + 1)
    weights = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype) * seen
    grads = torch.autograd.grad(out, list(leaves.values()), weights)
    return {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
