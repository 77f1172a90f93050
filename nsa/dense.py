"""The dense parts of the model, as functions that a compiler can take over whole.

What lies before the attention core (norm, projection, rotary positions, gates), what lies after it
(residual, norm, MLP), and the loss. The core, the modules that others watch through hooks
(embedding, layers, attention, last norm, head) and the names of the parameters are not touched. The
functions know their layer by its modules only, so that one compiled graph serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nsa.config import NSAConfig
from nsa.projection import in_parts, side_by_side

Enter = Callable[
    [Tensor, nn.Module | None, nn.Module, Tensor, Tensor, NSAConfig], tuple[Tensor, ...]
]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The functions of this module, compiled or not."""

    enter_together: Enter
    enter_apart: Enter
    leave: Callable[[Tensor, Tensor, nn.Module, nn.Module], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


def enter_together(
    x: Tensor,
    norm: nn.Module | None,
    in_proj: nn.Module,
    gate_bias: Tensor,
    turns: Tensor,
    cfg: NSAConfig,
) -> tuple[Tensor, ...]:
    """`side_by_side` of the projection of norm(x), x [B,S,dim], turns [S, d_k/2, 2]."""
    y = in_proj(x if norm is None else norm(x))
    return side_by_side(y, gate_bias, turns, cfg)


def enter_apart(
    x: Tensor,
    norm: nn.Module | None,
    in_proj: nn.Module,
    gate_bias: Tensor,
    turns: Tensor,
    cfg: NSAConfig,
) -> tuple[Tensor, ...]:
    """The same by part, each contiguous, group before token: as attention on a CPU reads them."""
    found = in_parts(enter_together(x, norm, in_proj, gate_bias, turns, cfg), cfg)
    return tuple(
        part.contiguous()
        for part in (
            found.q,
            found.k_cmp,
            found.k_sel,
            found.k_win,
            found.v_cmp,
            found.v_sel,
            found.v_win,
            found.gates,
        )
    )


def leave(x: Tensor, attended: Tensor, norm: nn.Module, mlp: nn.Module) -> Tensor:
    """A layer's output from its input x and what attention adds, both [B,S,dim]."""
    x = x + attended
    out: Tensor = x + mlp(norm(x))
    return out


def mean_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Mean of -ln p(next token) over logits [B,S,V] for tokens [B,S], in nats, in float32."""
    return cross_entropy(logits.float().flatten(0, 1), following.flatten())
