"""A layer whose core is Triton's kernels, compiled and not, in Triton's interpreter.

One of the proofs of `tests.attention.in_interpreter`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import ModelConfig, NSAConfig, Way
from nsa.model import Layer, Whole
from nsa.rounding import Gap, error_of
from nsa.step.compiled import Compiled, compile_layers, count_compiled

SHAPE = NSAConfig(
    dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=16, d=8, l_sel=16, n_sel=3, w=16
)


def gradients(layer: Layer, x: Tensor, by: Whole | None) -> dict[str, Tensor]:
    """The output, and gradients of its squares."""
    leaves = {"input": x, **dict(layer.named_parameters())}
    out = layer(x, by=by)
    found = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    return {"output": out.detach(), **dict(zip(leaves, found, strict=True))}


def compiled_layer() -> list[str]:
    """What differs between the layer and its one graph, in numbers, blocks and operators."""
    torch.manual_seed(0)
    layer = Layer(ModelConfig(vocab_size=11, n_layers=1, attention=SHAPE))
    layer.attention.way = Way(force_sdpa=True, kernels="triton")
    x = torch.randn(1, 72, SHAPE.dim, requires_grad=True)
    before = gradients(layer, x, None)
    blocks = layer.attention.last_blocks
    names: list[str] = []

    def noting(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def boxed(graph: torch.fx.GraphModule, given: object) -> object:
        return make_boxed_func(noting(graph, given).forward)

    start = count_compiled()
    after = gradients(layer, x, compile_layers(aot_autograd(fw_compiler=boxed)).layer)
    gaps = [
        Gap.twice(what=what, error=error_of(after[what], right).whole, ours=0.0)
        for what, right in before.items()
    ]
    did = count_compiled()
    assert blocks is not None and layer.attention.last_blocks is not None
    missing = {"nsa.core.default", "nsa.core_backward.default"} - set(names)
    return [
        *(str(gap) for gap in gaps if gap.too_wide),
        *[f"{did} after {start}"] * (did != Compiled(start.graphs + 1, start.breaks)),
        *["other blocks"] * (not torch.equal(blocks, layer.attention.last_blocks)),
        *(f"{name} is not in the graph" for name in sorted(missing)),
    ]
