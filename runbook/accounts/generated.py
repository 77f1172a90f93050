"""Generated data made anew: the rows that a rank has to have read follow from the config alone.

docs/trainer-contract.md ("Data") defines them. Nothing here comes from the trainer's generator, so
that a generator that gives other rows, however alike on all ranks, is seen.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runbook.folder.launch.shapes import is_count

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
