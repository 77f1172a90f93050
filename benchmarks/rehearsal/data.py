"""What the ranks of a rehearsed launch read: digests of generated rows, after the contract."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import numpy as np

# docs/trainer-contract.md, "Data".
_CHANCES = {7: 0.55, 60: 0.25, 101: 0.15, 173: 0.05}
_WORD = 2**64


def digest_of_rows(dataset: str, numbers: Iterable[int], *, seed: int, vocabulary: int,
                   seq_len: int) -> str:  # fmt: skip
    """Of the rows that these streams of random numbers give, in hexadecimal."""
    total = sum(_row(dataset, seed, vocabulary, seq_len + 1, number) for number in numbers)
    return f"{total % _WORD:016x}"


@functools.cache
def _row(dataset: str, seed: int, vocabulary: int, width: int, number: int) -> int:
    random = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
    if dataset == "markov":
        jumps = random.choice(list(_CHANCES), width, p=list(_CHANCES.values())).astype(np.int64)
        jumps[0] = random.integers(0, vocabulary)
        tokens = np.cumsum(jumps) % vocabulary
    elif dataset == "synthetic":
        tokens = random.integers(0, vocabulary, width, dtype=np.int64)
    else:  # documents: any that no other row has
        tokens = np.array([number, seed])
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
