"""The language model: embeddings, NSA layers with SwiGLU, RMSNorm, output head."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nsa.config import ModelConfig, Way
from nsa.contract import NSAError
from nsa.dense import Dense
from nsa.layer import NSAAttention

__all__ = ["ModelConfig", "NSALanguageModel", "SwiGLU"]


class Recorded(Protocol):
    """Layers that can be replayed instead of run (`nsa.kernels.cuda_graphs`)."""

    def fits(self, x: Tensor) -> bool:
        """May this pass, whose first layer gets x [B,S,dim], be replayed?"""

    def run(self, x: Tensor) -> Tensor:
        """The output of the last layer for the first one's x [B,S,dim]."""

    def run_from_host(self, passes: int = 1) -> None:
        """Do not replay in the next forward passes."""


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
        self.attention_norm = nn.RMSNorm(dim, eps=cfg.norm_eps)
        self.attention = NSAAttention(cfg.attention, cfg.way, rope_base=cfg.rope_base)
        self.mlp_norm = nn.RMSNorm(dim, eps=cfg.norm_eps)
        self.mlp = SwiGLU(dim, cfg.mlp_hidden)
        self.dense: Dense | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,dim] to [B,S,dim]."""
        if self.dense is not None:
            attended = self.attention(x, self.attention_norm)
            return self.dense.leave(x, attended, self.mlp_norm, self.mlp)
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


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
        self.norm = nn.RMSNorm(dim, eps=cfg.norm_eps)
        self.head = nn.Linear(dim, cfg.vocab_size, bias=False)
        self.recording: Recorded | None = None
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
        if self.recording is not None and self.training and self.recording.fits(x):
            replayed: Tensor = self.head(self.norm(self.recording.run(x)))
            return replayed
        for layer in self.layers:
            if self.cfg.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def use(self, dense: Dense | None) -> None:
        """Run the dense parts of every layer by these functions from now on; None: as they are."""
        for module in self.modules():
            if isinstance(module, Layer | NSAAttention):
                module.dense = dense

    def attend_by(self, way: Way) -> None:
        """Run the attention of every layer like this from now on."""
        for one in self.attentions():
            one.way = way

    def n_parameters(self) -> int:
        """Number of distinct parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def gate_numbers(self) -> Tensor:
        """Gate and selection health of every layer in the last forward pass [n_layers, 7].

        What `GateStats.of` takes; no synchronization. Raises NSAError before the first pass.
        """
        return torch.stack([one.gate_numbers() for one in self.attentions()])

    def attentions(self) -> list[NSAAttention]:
        """The attention of every layer, from the first to the last."""
        return [module for module in self.modules() if isinstance(module, NSAAttention)]
