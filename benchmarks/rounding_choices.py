"""How far gradients move where products round otherwise, and so choose other blocks.

    python -m benchmarks.rounding_choices [--layers 12] [--seq-len 2048] [--share 0.01]

The production model on the CPU in bfloat16, one micro-batch, its loss and gradients twice: as it
is, and with a share of what each projection of the attention gives moved by one unit in the last
place, as another algorithm of a library would. Blocks whose scores nearly tie are then chosen
otherwise. Gradients of each piece of the parameters are compared as the trainer does that computes
them twice: by root mean squares, of the whole piece and of 16 elements drawn from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.program import markdown_table
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import choose_device, start_ranks
from nsa.train.engine import Engine
from nsa.witness.accounts import pieces

_CONFIG = "configs/m7c_125m_1gpu.yaml"
_ULP = 2.0**-8
_TOGETHER, _DRAWS = 16, 200
_SHOWN = 8


def production(layers: int, seq_len: int) -> Engine:
    """On the CPU, by the operators that a GPU without Triton takes."""
    changed = {"runtime.gradient_checkpointing": "false", "runtime.device": "cpu"}
    changed |= {"model.n_layers": str(layers), "train.seq_len": str(seq_len)}
    words = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    plan = plan_launch(["--config", _CONFIG, "--ddp", "0", *words], {"NSA_PREFILL_BATCHED": "1"})
    engine = Engine(plan, start_ranks(plan, choose_device(plan)))
    for layer in engine.model.attentions():
        layer.force_sdpa = True
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


def main() -> None:
    """Print the pieces that are furthest off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.01)
    args = parser.parse_args()
    engine = production(args.layers, args.seq_len)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (2, args.seq_len + 1), generator=generator)
    plain, chosen = computed(engine, tokens)
    with rounding_otherwise(engine, args.share):
        moved, others = computed(engine, tokens)
    same = [float((a == b).all(-1).float().mean()) for a, b in zip(chosen, others, strict=True)]
    print(f"{1 - sum(same) / len(same):.2%} of the queries choose other blocks\n")
    pairs = dict(zip(engine.model.parameters(), zip(plain, moved, strict=True), strict=True))
    rows = []
    for piece in pieces(engine.model):
        mine, other = (piece.of(x).flatten().double() for x in pairs[piece.parameter])
        drawn = [
            torch.randint(0, mine.numel(), (_TOGETHER,), generator=generator) for _ in range(_DRAWS)
        ]
        worst = max(off(mine[at], other[at]) for at in drawn)
        rows.append((off(mine, other), worst, piece.name))
    rows.sort(reverse=True)
    cells = [(name, f"{whole:.2%}", f"{worst:.2%}") for whole, worst, name in rows[:_SHOWN]]
    print(markdown_table(("gradient of", "whole", f"worst {_TOGETHER} of {_DRAWS} draws"), cells))


if __name__ == "__main__":
    main()
