"""Run liger-kernel's norm and MLP against ours in Triton's interpreter: prints the gaps as JSON.

A process of its own, because the interpreter is chosen when Triton is imported
(TRITON_INTERPRET=1). Two things that it lacks are lent to it: it hands floats to a kernel as
Python's, where a compiled kernel gets numbers of 32 bits, and it cannot call CUDA's own library, of
which the norm uses one function (rsqrt).
"""

from __future__ import annotations

import json

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from nsa.config import ModelConfig, NSAConfig
from nsa.kernels.compiled import LIGER_MLP_NODE, LIGER_NORM_NODE, backward_nodes, use_liger
from nsa.kernels.kernel_check import compare
from nsa.model import NSALanguageModel, mean_loss

SHAPE = NSAConfig(dim=24, n_heads=2, n_kv_groups=1, d_k=6, d_v=6, l=4, d=2, l_sel=4, n_sel=3, w=4)
_convert = interpreter._implicit_cvt


def _with_floats(value: object) -> object:
    if isinstance(value, float):
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.core.tensor(handle, tl.float32)
    return _convert(value)


def main() -> None:
    from liger_kernel.ops import rms_norm

    interpreter._implicit_cvt = _with_floats
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # found when called: the interpreter replaces it
    torch.manual_seed(0)
    model = NSALanguageModel(ModelConfig(vocab_size=11, n_layers=2, attention=SHAPE))
    tokens = torch.randint(11, (2, 12))
    mine = _gradients(model, tokens)
    use_liger(model, True)
    gaps = compare(model, mean_loss, tokens=(2, 12), autocast=torch.enable_grad)
    theirs = _gradients(model, tokens)
    nodes = backward_nodes(model(tokens).square().mean())
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(theirs, mine, strict=True))
    names = list(model.state_dict())
    use_liger(model, False)
    print(
        json.dumps(
            {
                "gaps": [[gap.what, gap.error, gap.allowed, gap.too_wide] for gap in gaps],
                "gradients": worst,
                "nodes": [nodes[LIGER_NORM_NODE], nodes[LIGER_MLP_NODE]],
                "names": names == list(model.state_dict()),
                "off": backward_nodes(model(tokens).mean())[LIGER_NORM_NODE],
            }
        )
    )


def _gradients(model: NSALanguageModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(tokens).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


if __name__ == "__main__":
    main()
