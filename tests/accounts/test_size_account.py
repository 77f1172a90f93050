"""The size of a model follows from its shape: held against models that are built."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from nsa.config import ModelConfig, NSAConfig
from nsa.model import NSALanguageModel
from runbook.accounts.first_weights import size_account
from runbook.folder.launch.shapes import ENV, shaped

SMALL = {"dim": 24, "n_heads": 4, "n_kv_groups": 2, "d_k": 6, "d_v": 10, "l": 8, "d": 4}
SMALL |= {"l_sel": 8, "n_sel": 3, "w": 8}


def env(cfg: ModelConfig, n_params: object) -> dict[str, Any]:
    """What env.json has of a model."""
    own = asdict(cfg.attention)
    names = ("dim", "n_heads", "n_kv_groups", "d_k", "d_v")
    return {
        "config": {
            "model": {name: own[name] for name in names}
            | {
                "n_layers": cfg.n_layers,
                "mlp_ratio": cfg.mlp_ratio,
                "tie_embeddings": cfg.tie_embeddings,
            },
            "nsa": {"l": own["l"], "phi": own["phi"]},
        },
        "effective": {"n_params": n_params, "vocab_size": cfg.vocab_size},
    }


def built(cfg: ModelConfig, *, once: bool = True) -> int:
    """The parameters of a model of this config: a shared one once, or as often as it is named."""
    with torch.device("meta"):
        model = NSALanguageModel(cfg)
    return sum(p.numel() for _, p in model.named_parameters(remove_duplicate=once))


@pytest.mark.parametrize(
    ("phi", "tied", "ratio", "layers"),
    [("avg", True, 8 / 3, 1), ("mlp", False, 1.3, 3), ("mlp", True, 8 / 3, 3)],
)
def test_a_models_own_count_balances(phi: Any, tied: bool, ratio: float, layers: int) -> None:
    attention = NSAConfig(**SMALL, phi=phi)
    cfg = ModelConfig(
        vocab_size=50, n_layers=layers, attention=attention, mlp_ratio=ratio, tie_embeddings=tied
    )
    assert size_account(env(cfg, built(cfg))) == []
    if tied:
        (problem,) = size_account(env(cfg, built(cfg, once=False)))
        assert f"a model of its config has {built(cfg)}" in problem
    for wrong in (built(cfg) - 1, 0, None):
        assert size_account(env(cfg, wrong))


def test_the_production_model() -> None:
    cfg = ModelConfig(vocab_size=256, n_layers=12)
    assert size_account(env(cfg, 78_404_784)) == []
    (problem,) = size_account(env(cfg, 78_404_784 + 256 * 768))
    assert problem == ("env.json counts 78601392 parameters, a model of its config has 78404784")


@pytest.mark.parametrize(
    ("section", "name"),
    [("model", "dim"), ("model", "tie_embeddings"), ("nsa", "phi"), ("nsa", "l")],
)
@pytest.mark.parametrize("odd", [None, "many", [1]])
def test_a_shape_that_is_not_told_is_no_proof(section: str, name: str, odd: object) -> None:
    told = env(ModelConfig(vocab_size=256, n_layers=12), 78_404_784)
    told["config"][section][name] = odd
    fitted, _ = shaped(told, ENV, "env.json")
    assert size_account(fitted)
    del told["config"][section]
    assert size_account(told) == ["env.json does not say which shape the model has"]
    assert size_account({})
