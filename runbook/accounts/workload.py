"""What env.json says that one launch trains: what its accounts are held against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runbook.accounts.generated import GeneratedData
from runbook.folder.launch.documents import recorded_toggles
from runbook.folder.launch.shapes import ENV, is_count, shaped
from runbook.records.launch import PROFILE_FLAG

# Numbers of the same step in two files: only their rounding may differ.
COPY_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Which checkpoints a config wants, and keeps.

    One after `saves` steps each (0: none is wanted); of them the `last` newest (0: all), those of
    every `every` steps, and the `best` stay.
    """

    saves: int = 0
    last: int = 0
    every: int = 0
    best: bool = False

    @classmethod
    def of(cls, train: Mapping[str, Any]) -> Keeping:
        """From section `train` of a config."""
        return cls(
            saves=train.get("save_every") or 0,
            last=train.get("keep_last") or 0,
            every=train.get("keep_every") or 0,
            best=bool(train.get("keep_best")),
        )

    def stay(self, written: Sequence[int], losses: Mapping[int, float]) -> list[int]:
        """Of these steps those that stay; `losses` by step, of those that were evaluated.

        One that was the best only for a while is gone: the last save left the best of all.
        """
        steps = sorted(written)
        if not self.last:
            return steps
        known = [(loss, step) for step, loss in losses.items() if step in steps]
        finite = [one for one in known if math.isfinite(one[0])]
        best = {min(finite)[1]} if self.best and finite else set()
        regular = {step for step in steps if self.every and step % self.every == 0}
        return sorted({*steps[-self.last :], *regular, *best})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What env.json says that one launch trains: tokens of a rank in a step, in a pass."""

    nproc: int
    step_tokens: int
    pass_tokens: int
    seq_len: int
    block: int
    wire: str | None
    data: GeneratedData | None
    dtype: str
    device: str
    layers: int | None = None
    grad_clip: float | None = None
    steps: int | None = None
    profiled: bool = False
    eval_every: int = 0
    eval_batches: int = 0
    keeping: Keeping = field(default_factory=Keeping)
    # Of the model, by the config's names; empty where env.json does not tell.
    shape: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, env: Mapping[str, Any]) -> Workload:
        """From env.json. Raises `ValueError` where it lacks what is needed."""
        env, _ = shaped(env, ENV, "env.json")
        effective, config = env.get("effective") or {}, env.get("config") or {}
        lacking = [
            name
            for name, value in {"world_size": env.get("world_size"), **_needed(effective)}.items()
            if not value or (is_count(value) and value < 0)
        ]
        if lacking:
            raise ValueError(f"env.json has no usable {', '.join(lacking)}")
        nproc, seq_len = env["world_size"], effective["seq_len"]
        train = config.get("train") or {}
        per_pass = effective["per_rank_batch"] * seq_len
        return cls(
            nproc=nproc,
            step_tokens=per_pass * effective["accumulation"],
            pass_tokens=per_pass,
            seq_len=seq_len,
            block=(config.get("nsa") or {}).get("l") or 0,
            wire=_wire(env, nproc),
            data=GeneratedData.of(env),
            dtype=effective["dtype"],
            device=str(effective.get("device")),
            layers=(config.get("model") or {}).get("n_layers"),
            grad_clip=train.get("grad_clip"),
            steps=effective.get("steps"),
            profiled=any(str(word).startswith(PROFILE_FLAG) for word in env.get("argv") or ()),
            eval_every=train.get("eval_every") or 0,
            eval_batches=train.get("eval_batches") or 0,
            keeping=Keeping.of(train),
            shape={**(config.get("model") or {}), **(config.get("nsa") or {})},
        )


def _needed(effective: Mapping[str, Any]) -> dict[str, Any]:
    names = ("per_rank_batch", "seq_len", "accumulation", "dtype")
    return {f"effective.{name}": effective.get(name) for name in names}


def _wire(env: Mapping[str, Any], nproc: int) -> str | None:
    """The type that gradients should travel in; None where that is not known.

    The arms may differ in it, and of one rank env.json does not say whether DDP, whose hook
    narrows the gradients of a single rank too, was there: row `compression` asks for that.
    """
    if "NSA_DDP_COMPRESS" in str(env.get("arms") or ""):
        return None
    toggles = recorded_toggles(env)
    kind = str(toggles.get("NSA_DDP_COMPRESS") or "off")
    if kind == "off":
        return "fp32"
    return None if nproc == 1 else kind
