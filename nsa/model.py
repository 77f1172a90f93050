"""The language model around the attention layer: embeddings, SwiGLU, RMSNorm, output head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nsa.attention.tracing import is_watched
from nsa.config import NORM_EPS, ModelConfig, Way
from nsa.contract import NSAError
from nsa.layer import NSAAttention, Recorded


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,dim] to [B,S,dim]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        dim = cfg.attention.dim
        self.attention_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.attention = NSAAttention(cfg.attention, cfg.way)
        self.mlp_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.mlp = SwiGLU(dim, cfg.mlp_hidden)

    def forward(self, x: Tensor, *, by: Whole | None = None) -> Tensor:
        """x [B,S,dim] to [B,S,dim], by the modules, or by what a compiler made of `whole`."""
        if by is None:
            x = x + self.attention(self.attention_norm(x))
            out: Tensor = x + self.mlp(self.mlp_norm(x))
            return out
        own = self.attention
        # Compilers know no complex numbers.
        turns = torch.view_as_real(own.turns(x.shape[1], x))
        out, own.last_gates, own.last_blocks = by(self, x, turns)
        return out


# A layer, its input and `NSAAttention.turns` as real numbers, to what `whole` gives.
Whole = Callable[[Layer, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def whole(layer: Layer, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All that a layer does with x [B,S,dim], as one function: output, gates and chosen blocks.

    No hook of a module inside the layer is called that the compiler did not see.
    """
    attended, gates, blocks = layer.attention.attend(layer.attention_norm(x), turns)
    x = x + attended
    return x + layer.mlp(layer.mlp_norm(x)), gates, blocks


def mean_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Mean of -ln p(next token) over logits [B,S,V] for tokens [B,S], in nats, in float32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())


class NSALanguageModel(nn.Module):
    """Decoder-only language model with Native Sparse Attention in every layer.

    At the production shape (dim 768, 12 layers) it has 78.4M parameters with a tied vocabulary of
    256 and 116.8M with a tied 50,304.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        dim = cfg.attention.dim
        self.embedding = nn.Embedding(cfg.vocab_size, dim)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, cfg.vocab_size, bias=False)
        self.recording: Recorded | None = None
        self.compiled: Whole | None = None
        self._from_host = 0
        self._initialize()
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight

    def _initialize(self) -> None:
        """Normal with deviation 0.02; what writes into the residual stream shrinks with depth."""
        residual = 0.02 / math.sqrt(2 * self.cfg.n_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes = name.endswith(("attention.out_proj", "mlp.down"))
                nn.init.normal_(module.weight, std=residual if writes else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B,S,V] for tokens [B,S] int64; position t sees tokens 0..t only.

        Raises NSAError for another shape or type.
        """
        if tokens.dim() != 2 or tokens.dtype != torch.int64:
            raise NSAError(
                f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}: must be int64 [B,S]"
            )
        x = self.embedding(tokens)
        by_host = self._takes_from_host()
        may_replay = self.recording is not None and self.training and not by_host
        replayed = self.recording(x) if self.recording and may_replay else None
        if replayed is not None:
            return cast("Tensor", self.head(self.norm(replayed)))
        # Decided once: what is computed again in the backward pass has to run the same way.
        by = self.compiled if self.compiled and not (by_host or self._is_watched()) else None
        for layer in self.layers:
            if self.cfg.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False, by=by)
            else:
                x = layer(x, by=by)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def run_from_host(self, passes: int = 1) -> None:
        """Let the modules themselves run in the next training passes, not replayed nor compiled."""
        self._from_host = passes

    def _takes_from_host(self) -> bool:
        if not (self._from_host and self.training):
            return False
        self._from_host -= 1
        return True

    def _is_watched(self) -> bool:
        """Does somebody watch what a compiled layer would not show? Its own hooks are called."""
        layers = set(self.layers)
        return is_watched(m for m in self.layers.modules() if m not in layers)

    def attend_by(self, way: Way) -> None:
        """Run the attention of every layer like this from now on."""
        for one in self.attentions():
            one.way = way

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Run the attention of every layer with nothing but products, masks and softmax."""
        before = self.attentions()[0].way
        self.attend_by(replace(before, kernels="masked"))
        try:
            yield
        finally:
            self.attend_by(before)

    def n_parameters(self) -> int:
        """Number of distinct parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def gate_numbers(self) -> Tensor:
        """Gate and selection health of every layer in the last forward pass [n_layers, 7].

        What `gate_stats` takes; no synchronization. Raises NSAError before the first pass.
        """
        return torch.stack([one.gate_numbers() for one in self.attentions()])

    def attentions(self) -> list[NSAAttention]:
        """The attention of every layer, from the first to the last."""
        return [module for module in self.modules() if isinstance(module, NSAAttention)]
