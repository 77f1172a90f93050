"""Accounts that must balance: facts of one launch that two sources tell, held against each other.

What the trainer says about itself is believed only where something else in the same folder says
so too. Every account returns what does not balance, in words; a source that is missing does not
balance either. `registry` has all of them: rows and `inspect` go through the same table.

Here is what they share: their words, and the `Workload` that env.json tells of, which they hold
sources against. The rows that a rank has to have read follow from the config alone:
docs/trainer-contract.md ("Data") defines them. Nothing of `GeneratedData` comes from the trainer's
generator, so that a generator that gives other rows, however alike on all ranks, is seen.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runbook.folder.launch.documents import recorded_toggles
from runbook.folder.launch.shapes import is_count, shape_of, shaped
from runbook.records.evidence import Frame, RankLog
from runbook.records.launch import PROFILE_FLAG

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KINDS = ("synthetic", "markov")
# How far a token of the chain lies from the one before, and how often.
_JUMPS = (7, 60, 101, 173)
_CHANCES = (0.55, 0.25, 0.15, 0.05)
_TRAINED_ON, _HELD_OUT = 0, 1
_WORD = 1 << 64
# So many rows of a launch are made again: 70 us each at S=2048.
_MOST_ROWS = 1024
# However many ranks share them, a few steps of each are looked at.
_LEAST_STEPS = 4
# Tokens of a rank in a step: no memory holds more, and a file may say anything.
_MOST_TOKENS = 1 << 26
# Numbers of the same step in two files: only their rounding may differ.
COPY_TOLERANCE = 1e-6


def each_rank(check: Callable[..., Iterable[str]]) -> Callable[..., list[str]]:
    """An account of all `ranks`, made from one of a `rank`: its texts go on behind `rank 1`."""
    inner = inspect.signature(check)
    named = ((name.replace("rank", "ranks"), one) for name, one in inner.parameters.items())
    outer = inner.replace(parameters=[one.replace(name=name) for name, one in named])

    @functools.wraps(check)
    def account(*args: Any, **named: Any) -> list[str]:
        given = outer.bind(*args, **named).arguments
        ranks = given.pop("ranks")
        return [f"rank {rank.rank}{text}" for rank in ranks for text in check(rank=rank, **given)]

    vars(account)["__signature__"] = outer
    return account


def within(value: object, limit: float) -> bool:
    """Is it a number from 0 to the limit?"""
    return isinstance(value, int | float) and 0 <= value <= limit


def apart(one: object, other: object) -> float:
    """How far two numbers lie apart; NaN, which is near nothing, where one is none."""
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return math.nan
    return abs(one - other)


def due(rank: RankLog, every: int) -> set[int]:
    """The steps after which something is asked for; of the last one the launch's end decides."""
    if not every or rank.steps is None:
        return set()
    ended = rank.steps["step"].iloc[:-1]
    return set(ended[ended % every == 0].astype(int))


def computed_twice(
    frame: Frame, column: str, again: Mapping[str, Any], name: str
) -> list[tuple[int, float, float]]:
    """Steps that a rank computed a second time, each with the CSV's number and what came out.

    `again` is what the rank tells of them. The CSV's is NaN where that has no such step.
    """
    told = dict(zip(frame["step"].tolist(), frame[column].tolist(), strict=True))
    both = zip(again.get("steps") or (), again.get(name) or (), strict=False)
    return [(step, told.get(step, math.nan), found) for step, found in both]


@dataclass(frozen=True, kw_only=True)
class GeneratedData:
    """What one launch trains on. `rows`: of one rank in one micro-batch."""

    kind: str
    seed: int
    vocab_size: int
    seq_len: int
    nproc: int
    rows: int
    accumulation: int

    @classmethod
    def of(cls, env: Mapping[str, Any]) -> GeneratedData | None:
        """From env.json; None for data that are read. Raises `ValueError` where something lacks."""
        effective = env.get("effective") or {}
        if effective.get("dataset") not in KINDS:
            return None
        seed: Any = ((env.get("config") or {}).get("train") or {}).get("seed")
        vocab_size: Any = effective.get("vocab_size")
        told = {"config.train.seed": (seed, 0), "effective.vocab_size": (vocab_size, 1)}
        lacking = [
            name
            for name, (value, least) in told.items()
            if not (is_count(value) and least <= value < _WORD)
        ]
        if lacking:
            raise ValueError(f"env.json has no usable {', '.join(lacking)}")
        made = cls(
            kind=effective["dataset"],
            seed=seed,
            vocab_size=vocab_size,
            seq_len=effective["seq_len"],
            nproc=env["world_size"],
            rows=effective["per_rank_batch"],
            accumulation=effective["accumulation"],
        )
        if not made.can_make(made.accumulation):
            raise ValueError("env.json tells of more tokens in a step than a rank can read")
        return made

    def can_make(self, batches: int) -> bool:
        """Whether so many batches of a rank are few enough to be made again."""
        return batches * self.rows * (self.seq_len + 1) <= _MOST_TOKENS

    def of_step(self, rank: int, step: int) -> str:
        """The digest of what a rank reads in a step, in hexadecimal."""
        last = step * self.accumulation
        return self._digest(rank, range(last - self.accumulation, last), _TRAINED_ON)

    def held_out(self, rank: int, batches: int) -> str:
        """The digest of what a rank reads in an evaluation of so many batches."""
        return self._digest(rank, range(batches), _HELD_OUT)

    def drawn(self, token: str, steps: Sequence[int]) -> list[int]:
        """The steps that are looked at, ascending: all of few, and of many some by the token."""
        most = max(_LEAST_STEPS, _MOST_ROWS // (self.nproc * self.rows * self.accumulation))
        if len(steps) <= most:
            return sorted(steps)

        def lot(step: int) -> bytes:
            return hashlib.blake2b(f"data {step} {token}".encode(), digest_size=8).digest()

        return sorted(sorted(steps, key=lot)[:most])

    def _digest(self, rank: int, batches: Iterable[int], stream: int) -> str:
        firsts = [(batch * self.nproc + rank) * self.rows for batch in batches]
        total = sum(
            _row_digest(
                self.kind, self.seed, self.vocab_size, self.seq_len + 1, (2 * row + stream) % _WORD
            )
            for first in firsts
            for row in range(first, first + self.rows)
        )
        return f"{total % _WORD:016x}"


@functools.lru_cache(maxsize=1 << 15)
def _row_digest(kind: str, seed: int, vocab_size: int, width: int, number: int) -> int:
    row = _row(kind, seed, vocab_size, width, number)
    return int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little")


def _row(kind: str, seed: int, vocab_size: int, width: int, number: int) -> npt.NDArray[np.int64]:
    """The tokens of a row: of the stream of random numbers that seed and number name."""
    import numpy as np

    key = np.array([seed, number], dtype=np.uint64)
    random = np.random.Generator(np.random.Philox(key=key))
    if kind == "synthetic":
        return random.integers(0, vocab_size, width, dtype=np.int64)
    reached = np.cumsum(_CHANCES)
    which = np.searchsorted(reached / reached[-1], random.random(width), side="right")
    jumps = np.array(_JUMPS, dtype=np.int64)[which]
    jumps[0] = random.integers(0, vocab_size)
    chain: npt.NDArray[np.int64] = np.cumsum(jumps) % vocab_size
    return chain


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
        env, _ = shaped(env, shape_of("env"), "env.json")
        effective, config = env.get("effective") or {}, env.get("config") or {}
        needed = {"world_size": env.get("world_size")}
        for name in ("per_rank_batch", "seq_len", "accumulation", "dtype"):
            needed[f"effective.{name}"] = effective.get(name)
        lacking = [
            name for name, value in needed.items() if not value or (is_count(value) and value < 0)
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
