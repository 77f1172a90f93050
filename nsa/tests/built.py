"""The model that the trainer builds from a config file, in float64 and with weights that hide
nothing: no gate bias is 0, no norm's weight is 1, and attention is far from uniform.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn.functional import cross_entropy

from nsa.config import ModelConfig, NSAConfig
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import choose_device, start_ranks
from nsa.layer import NSAAttention
from nsa.step.engine import Engine
from nsa.witness import oracle

# More blocks than n_sel from S = 33 (65) on; l/d = 2 and l_sel/d = 4, as in production, in one.
# No value is one that the trainer has by itself.
SHAPE = {"dim": 24, "n_layers": 2, "n_heads": 6, "n_kv_groups": 2, "d_k": 8, "d_v": 6}
SHAPE |= {"mlp_ratio": 2.0}
CASES = {
    "avg, tied head": {
        "model": {**SHAPE, "tie_embeddings": True},
        "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 10, "phi": "avg"},
    },
    "mlp, own head": {
        "model": {**SHAPE, "tie_embeddings": False},
        "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 10, "phi": "mlp"},
    },
}
BATCHED = {"NSA_PREFILL_BATCHED": "1"}
# How training can be asked to run: variables of the environment, and settings.
WAYS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "batched v2": (BATCHED, ()),
    "batched v1": ({**BATCHED, "NSA_SEL_RANGES_V2": "0"}, ()),
    "without flash": (BATCHED, ("runtime.use_flash=false",)),
    "sdpa": ({**BATCHED, "NSA_SDPA_NO_FLASH": "1"}, ()),
    "recomputed": (BATCHED, ("runtime.gradient_checkpointing=true",)),
    "token by token v2": ({}, ()),
    # The one way that reads the ranges token by token; the others only ask which blocks they hold.
    "token by token v1": ({"NSA_SEL_RANGES_V2": "0"}, ()),
}
# Three: what goes wrong from the third row on is met as well.
BATCH, VOCABULARY = 3, 256


def config(case: str) -> ModelConfig:
    """What the trainer has to make of a case, from the file's words and not from its plan."""
    words = dict(CASES[case]["model"])
    layers, tied = words.pop("n_layers"), words.pop("tie_embeddings")
    ratio = words.pop("mlp_ratio")
    return ModelConfig(
        vocab_size=VOCABULARY,
        n_layers=layers,
        attention=NSAConfig(**words, **CASES[case]["nsa"]),
        mlp_ratio=ratio,
        tie_embeddings=tied,
    )


def build(
    case: str,
    way: str,
    folder: Path,
    *,
    seed: int = 0,
    as_begun: bool = False,
    precision: str = "fp32",
) -> Engine:
    """The trainer's own engine for a case and a way to run, with its weights replaced.

    as_begun: the weights stay those that the trainer begins with.
    """
    file = write_config(case, folder, steps=1, seed=seed, precision=precision)
    environment, settings = WAYS[way]
    chosen = as_typed(settings)
    plan = plan_launch(["--config", str(file), *chosen], environment)
    engine = Engine(plan, start_ranks(plan, choose_device(plan)))
    engine.model.double()
    engine.configure(plan.toggles)
    if not as_begun:
        randomize(engine.model)
    return engine


def as_typed(settings: Iterable[str]) -> list[str]:
    """`--set` before each of them."""
    return [word for setting in settings for word in ("--set", setting)]


def write_config(
    case: str,
    folder: Path,
    *,
    steps: int,
    seq_len: int = 64,
    seed: int = 0,
    precision: str = "fp32",
) -> Path:
    """A config file of the trainer for a case."""
    train: dict[str, float] = {"steps": steps, "seq_len": seq_len, "batch_size": BATCH, "lr": 1e-3}
    train |= {"grad_clip": 0.0, "seed": seed}
    runtime = {"device": "auto", "precision": precision}
    whole = {**CASES[case], "data": {"tokenizer": "byte"}, "runtime": runtime, "train": train}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(whole))
    return file


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """The same weights every time, of a size that makes every part of the model matter."""
    generator = torch.Generator().manual_seed(20)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            value = 1 + 0.3 * value
        elif "in_proj" in name:
            value *= 1.5 * parameter.shape[1] ** -0.5
        elif name.endswith(("position", "embedding.weight", "head.weight")):
            value *= 0.5
        elif parameter.dim() == 2:
            value *= parameter.shape[1] ** -0.5
        parameter.copy_(value)


def weights(model: nn.Module) -> dict[str, oracle.Array]:
    """What a checkpoint would hold, for the oracle."""
    return {name: value.cpu().numpy().copy() for name, value in model.state_dict().items()}


def tokens(seq_len: int) -> oracle.Index:
    """Random tokens [BATCH, S+1]: inputs and, one further, targets."""
    return np.random.default_rng(seq_len).integers(0, VOCABULARY, (BATCH, seq_len + 1))


def attentions(model: nn.Module) -> list[NSAAttention]:
    """The attention layers, from the first to the last."""
    return [module for module in model.modules() if isinstance(module, NSAAttention)]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are proven together: (name, rows) of each."""

    name: str
    members: tuple[tuple[str, slice], ...]

    def direction(self, values: dict[str, oracle.Array], seed: int) -> list[oracle.Array]:
        """A random direction of length 1 in the space of these parameters."""
        rng = np.random.default_rng(seed)
        way = [rng.standard_normal(values[name][rows].shape) for name, rows in self.members]
        length = np.sqrt(sum(float((part**2).sum()) for part in way))
        return [part / length for part in way]

    def moved(
        self, values: dict[str, oracle.Array], way: list[oracle.Array], step: float
    ) -> dict[str, oracle.Array]:
        """The weights after a step in a direction."""
        values = dict(values)
        for (name, rows), part in zip(self.members, way, strict=True):
            values[name] = values[name].copy()
            values[name][rows] += step * part
        return values

    def slope(self, gradients: dict[str, oracle.Array], way: list[oracle.Array]) -> float:
        """The derivative in a direction, from gradients."""
        pairs = zip(self.members, way, strict=True)
        return sum(float((gradients[name][rows] * part).sum()) for (name, rows), part in pairs)


def groups(model: nn.Module) -> dict[str, Group]:
    """Every parameter of the model, by what it is for: the rows of `in_proj` part by part."""
    parts = oracle.in_proj_rows(attentions(model)[0].cfg)
    found: dict[str, list[tuple[str, slice]]] = {}
    for name, _ in model.named_parameters():
        kind = re.sub(r"^layers\.\d+\.", "", name)
        if kind == "attention.in_proj.weight":
            for part, (rows, _, _) in parts.items():
                found.setdefault(part, []).append((name, rows))
        else:
            found.setdefault(kind, []).append((name, slice(None)))
    return {name: Group(name=name, members=tuple(members)) for name, members in found.items()}


def forward(
    engine: Engine, tokens: oracle.Index, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Logits as the trainer's step computes them."""
    assert engine.wrapped is not None
    logits = engine.wrapped(torch.from_numpy(tokens[:, :-1]).to(engine.device))
    assert logits.dtype == dtype
    return logits


def backward(engine: Engine, tokens: oracle.Index, dtype: torch.dtype = torch.float64) -> None:
    """The gradients of cross entropy in the model's parameters, and nothing else there."""
    engine.model.zero_grad(set_to_none=True)
    targets = torch.from_numpy(tokens[:, 1:]).to(engine.device)
    logits = forward(engine, tokens, dtype)
    cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


def gradients(
    engine: Engine, tokens: oracle.Index, dtype: torch.dtype = torch.float64
) -> dict[str, oracle.Array]:
    """Gradients in float64 by the name of the group's part: in_proj row by row of its parts."""
    backward(engine, tokens, dtype)
    return held(engine)


def held(engine: Engine) -> dict[str, oracle.Array]:
    """The gradients that the model's parameters hold, in float64."""
    named = dict(engine.model.named_parameters())
    return {
        f"{group.name}, {name}": named[name].grad[rows].double().cpu().numpy()  # type: ignore[index]
        for group in groups(engine.model).values()
        for name, rows in group.members
    }


def mean_gradient(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    """Of the mean loss of micro-batches [B,S+1], in float32: of all parameters, one by one."""
    losses = [cross_entropy(model(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten()) for b in batches]
    return flat(torch.autograd.grad(torch.stack(losses).mean(), model.parameters()))


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All elements as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    """The engine sets these for its process; other tests in this one must not see it."""
    cuda, precision = torch.backends.cuda, torch.get_float32_matmul_precision()
    flags = (
        (cuda.enable_flash_sdp, cuda.flash_sdp_enabled()),
        (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled()),
        (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),
        (cuda.enable_math_sdp, cuda.math_sdp_enabled()),
    )
    yield
    torch.set_float32_matmul_precision(precision)
    for restore, value in flags:
        restore(value)
