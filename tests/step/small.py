"""A small model of two layers, and tokens for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.config import ModelConfig, NSAConfig
from nsa.model import NSALanguageModel

SHAPE = NSAConfig(dim=16, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=6, d=3, l_sel=6, n_sel=3, w=7)


def model_of(**changes: Any) -> NSALanguageModel:
    torch.manual_seed(0)
    shape = replace(SHAPE, phi=changes.pop("phi", "avg"))
    return NSALanguageModel(ModelConfig(vocab_size=11, n_layers=2, attention=shape, **changes))


def tokens_of(rows: int = 2, count: int = 41) -> Tensor:
    return torch.randint(11, (rows, count), generator=torch.Generator().manual_seed(1))
