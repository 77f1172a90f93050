"""Roundings that choose other blocks move gradients; without them nothing moves.

The production model in bfloat16 computes loss and gradients twice: as it is, and with a share of
what each projection of the attention gives moved by one unit in the last place, as another
algorithm of a library would. Blocks whose scores nearly tie are then chosen otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nsa.config import Way
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import choose_device, start_ranks
from nsa.step.engine import Engine

_CONFIG = "configs/m7c_125m_1gpu.yaml"
_ULP = 2.0**-8


def production(layers: int, seq_len: int) -> Engine:
    """On the CPU, by the operators that a GPU without Triton takes."""
    changed = {"runtime.gradient_checkpointing": "false", "runtime.device": "cpu"}
    changed |= {"model.n_layers": str(layers), "train.seq_len": str(seq_len)}
    words = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    plan = plan_launch(["--config", _CONFIG, "--ddp", "0", *words], {"NSA_PREFILL_BATCHED": "1"})
    engine = Engine(plan, start_ranks(plan, choose_device(plan)))
    engine.model.attend_by(Way(force_sdpa=True))
    return engine


@contextmanager
def rounding_otherwise(engine: Engine, share: float) -> Iterator[None]:
    """Move that share of what projections give by a unit in the last place, up or down."""
    generator = torch.Generator().manual_seed(3)

    def moved(_: nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor:
        drawn = torch.rand(out.shape, generator=generator)
        sign = (drawn < share / 2).to(out.dtype) - (drawn > 1 - share / 2).to(out.dtype)
        return out * (1 + sign * _ULP)

    with ExitStack() as stack:
        for layer in engine.model.attentions():
            for projection in (layer.in_proj, layer.out_proj):
                stack.callback(projection.register_forward_hook(moved).remove)
        yield


def computed(engine: Engine, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of all parameters, and the blocks that each layer chose."""
    with engine.autocast():
        logits = engine.model(tokens[:, :-1])
    loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    found = list(torch.autograd.grad(loss, list(engine.model.parameters())))
    chosen = [x.last_blocks for x in engine.model.attentions() if x.last_blocks is not None]
    return found, chosen


def off(mine: Tensor, other: Tensor) -> float:
    """Root mean square of the difference, as a share of that of the first."""
    return float((mine - other).norm() / mine.norm())


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_what_a_share_of_roundings_moves(share: float) -> None:
    made = production(layers=1, seq_len=1280)
    tokens = torch.randint(0, 256, (1, 1281), generator=torch.Generator().manual_seed(2))
    found = []
    for how in (nullcontext(), rounding_otherwise(made, share)):
        with how:
            found.append(computed(made, tokens))
    (plain, chosen), (moved, others) = found
    largest = max(off(a.flatten(), b.flatten()) for a, b in zip(plain, moved, strict=True))
    same = all(torch.equal(a, b) for a, b in zip(chosen, others, strict=True))
    assert (largest == 0 and same) if share == 0 else (1e-3 < largest < 0.2 and not same)
