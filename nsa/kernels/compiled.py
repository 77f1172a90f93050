"""Other kernels for the dense parts: torch.compile with what it counts, and liger-kernel's.

The only module that knows names inside torch's compiler. They are those of torch 2.13.

Of liger-kernel (the extra `liger`) it is RMSNorm and SwiGLU. Its fused linear cross-entropy is not
used: it never makes the logits, and the logits are what the proofs of a launch are taken from
(positions, the loss by its definition, the oracle).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nsa.contract import Event
from nsa.dense import Dense, enter_apart, enter_together, leave, mean_loss
from nsa.launch.output import Heartbeat
from nsa.model import NSALanguageModel, SwiGLU
from nsa.settings import ConfigError


class Refused(ConfigError):
    """A toggle of how the dense parts run cannot be put in force here; says why."""


# What autograd calls the backward pass of one call of a compiled function.
COMPILED_NODE = "CompiledFunctionBackward"
# How the names begin by which the profiler knows compiled work.
GENERATED = {
    "calls": "Torch-Compiled Region",
    "kernels": "triton_",
    "graph_launches": "cudaGraphLaunch",
}
# Compiled calls of one forward pass in each layer (before and after the core), and the loss.
CALLS_PER_LAYER, CALLS_BESIDE = 2, 1
# How many graphs of one function are a mistake: with and without gradients, by two modes, and some.
_MOST_GRAPHS = 8


def compile_dense(mode: str) -> Dense:
    """The dense parts through torch.compile; `graphs` replays them as CUDA graphs.

    Nothing is compiled before the first call. A graph break, and more graphs of a function than can
    be meant, raise instead of running eagerly.
    """
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # DDP calls the functions from inside its own forward pass; cutting them at its buckets, as
    # torch does by default, helps only where the whole model is one graph.
    torch._dynamo.config.optimize_ddp = False
    # A pool of compiling processes would be children of the rank that nobody waits for.
    torch._inductor.config.compile_threads = 1
    made: dict[str, Any] = {
        function.__name__: torch.compile(
            function,
            fullgraph=True,
            dynamic=False,
            mode="reduce-overhead" if mode == "graphs" else None,
        )
        for function in (enter_together, enter_apart, leave, mean_loss)
    }
    return Dense(
        enter_together=made["enter_together"],
        enter_apart=made["enter_apart"],
        leave=made["leave"],
        loss=made["mean_loss"],
    )


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Since the process began: graphs made, breaks, CUDA graphs recorded, and refused ones."""

    graphs: int = 0
    breaks: int = 0
    recorded: int = 0
    skipped: int = 0

    @property
    def work(self) -> int:
        """What took a step's time, if it happened in one."""
        return self.graphs + self.recorded


def count_compiled() -> Compiled:
    """What torch's compiler has done so far; zeros where it was never loaded."""
    if "torch._dynamo.utils" not in sys.modules:
        return Compiled()
    from torch._dynamo.utils import counters

    return Compiled(
        graphs=int(counters["stats"]["unique_graphs"]),
        breaks=sum(counters["graph_break"].values()),
        recorded=_recorded(),
        skipped=int(counters["inductor"]["cudagraph_skips"]),
    )


def _recorded() -> int:
    """CUDA graphs that exist on this device, in the trees that torch keeps them in."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_available():
        return 0
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    todo: list[Any] = [] if manager is None else [n for r in manager.roots.values() for n in r]
    count = 0
    while todo:
        node = todo.pop()
        count += 1
        todo += [child for children in node.children.values() for child in children]
    return count


def begin_micro_batch() -> None:
    """CUDA graphs may reuse their memory from here on: the last micro-batch's is used up."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def keep_gradients(parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Copy each parameter's gradient out of the memory that the next replay overwrites.

    Without it the gradients of a second micro-batch replace those of the first one, in silence
    (pytorch issues 96693, 146569 and 169545).
    """
    return [p.register_hook(Tensor.clone) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]


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

    `in_steps`: graphs that were made or recorded in a block's timed steps: after its warm-up and
    after its toggles were judged.
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
        added = now.work - self._last.work
        self._last = now
        if timed:
            self.in_steps += added
        self._heartbeat.write(
            Event.COMPILED,
            where=where,
            timed=timed,
            added=added,
            graphs=now.graphs,
            recorded=now.recorded,
            breaks=now.breaks,
        )


# What autograd calls them: the norms (two in each layer and the last one), the MLP of each layer.
LIGER_NORM_NODE = "LigerRMSNormFunctionBackward"
LIGER_MLP_NODE = "LigerFusedGateUpSiLUMulFunctionBackward"


def use_liger(model: NSALanguageModel, on: bool) -> None:
    """Let every norm and MLP of the model run liger's kernels, or torch's again.

    Parameters, their names and hooks stay; only what the modules do inside changes.
    """
    for module in model.modules():
        if isinstance(module, nn.RMSNorm | SwiGLU):
            vars(module).pop("forward", None)
        if on and isinstance(module, nn.RMSNorm):
            vars(module)["forward"] = partial(_liger_norm, module)
        if on and isinstance(module, SwiGLU):
            vars(module)["forward"] = partial(_liger_mlp, module)


def _liger_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # All in float32, and no gradient overwritten: the residual stream still needs it.
    out: Tensor = LigerRMSNormFunction.apply(x, module.weight, module.eps, 0.0, "gemma", False)
    return out


def _liger_mlp(module: SwiGLU, x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    # Rows only: of version 0.8.5 the backward pass forgets any other shape.
    gated = LigerFusedGateUpSiLUMulFunction.apply(module.gate_up(x).flatten(0, -2))
    out: Tensor = module.down(gated.unflatten(0, x.shape[:-1]))
    return out
