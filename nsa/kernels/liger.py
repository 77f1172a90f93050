"""RMSNorm and SwiGLU by the Triton kernels of the package liger-kernel (the extra `liger`).

Its fused linear cross-entropy is not used: it never makes the logits, and the logits are what the
proofs of a launch are taken from (positions, the loss by its definition, the oracle).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from nsa.model import NSALanguageModel, SwiGLU

# What autograd calls them: the norms (two in each layer and the last one), the MLP of each layer.
NORM_NODE = "LigerRMSNormFunctionBackward"
MLP_NODE = "LigerFusedGateUpSiLUMulFunctionBackward"


def use(model: NSALanguageModel, on: bool) -> None:
    """Let every norm and MLP of the model run liger's kernels, or torch's again.

    Parameters, their names and hooks stay; only what the modules do inside changes.
    """
    for module in model.modules():
        if isinstance(module, nn.RMSNorm | SwiGLU):
            vars(module).pop("forward", None)
        if on and isinstance(module, nn.RMSNorm):
            vars(module)["forward"] = partial(_norm, module)
        if on and isinstance(module, SwiGLU):
            vars(module)["forward"] = partial(_mlp, module)


def _norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # All in float32, and no gradient overwritten: the residual stream still needs it.
    out: Tensor = LigerRMSNormFunction.apply(x, module.weight, module.eps, 0.0, "gemma", False)
    return out


def _mlp(module: SwiGLU, x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    # Rows only: of version 0.8.5 the backward pass forgets any other shape.
    gated = LigerFusedGateUpSiLUMulFunction.apply(module.gate_up(x).flatten(0, -2))
    out: Tensor = module.down(gated.unflatten(0, x.shape[:-1]))
    return out
