"""torch.compile of layers and of the loss, with what it counts.

The only module that knows names inside torch's compiler. They are those of torch 2.13.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from nsa.contract import Event
from nsa.launch.envfile import sdpa_kernels
from nsa.launch.output import Heartbeat
from nsa.model import Layer, Whole, mean_loss, whole
from nsa.settings import ConfigError


class Refused(ConfigError):
    """A toggle of how the layers run cannot be put in force here; says why."""


# What autograd calls the backward pass of one call of a compiled function.
COMPILED_NODE = "CompiledFunctionBackward"
# How the names begin by which the profiler knows compiled work.
GENERATED = {
    "calls": "Torch-Compiled Region",
    "kernels": "triton_",
    "graph_launches": "cudaGraphLaunch",
}
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
            Event.COMPILED,
            where=where,
            timed=timed,
            added=added,
            graphs=now.graphs,
            breaks=now.breaks,
        )
