"""What a launch's token draws: steps and batches that nobody knows before there is one.

Trainer and harness draw the same. Torch-free.
"""

from __future__ import annotations

import hashlib

# Pairs of steps, beside the first and the last one, in which the optimizer is watched: so many,
# and in a long launch one for so many steps, up to what is kept in memory until the end.
_FEWEST_PAIRS, _STEPS_A_PAIR, _MOST_PAIRS = 3, 240, 25
# A short launch has one pair for so many steps whose gradient is computed a second time.
_SHORT_STEPS_A_PAIR = 10


def _drawn_pairs(steps: int) -> int:
    """In how many pairs of its steps a launch is looked at: of a long one, 1 step in 120."""
    return min(_MOST_PAIRS, max(_FEWEST_PAIRS, steps // _STEPS_A_PAIR))


def _drawn_step(token: str, number: int, first: int, last: int) -> int:
    """A step that nobody knows before there is a token, and never the last of several."""
    return first + _below(last - first, f"{number} {token}")


def watched_steps(token: str, first: int, last: int) -> tuple[int, ...]:
    """The steps in which a launch from step `first` to `last` watches its optimizer, ascending.

    The first two, the last two, and pairs between that nobody knows before there is a token.
    """
    begins, pairs = {first, max(first, last - 1)}, _drawn_pairs(last - first + 1)
    begins |= {_drawn_step(token, number, first, last) for number in range(pairs)}
    return tuple(sorted({step for begin in begins for step in (begin, begin + 1) if step <= last}))


def recomputed_steps(
    token: str, first: int, last: int, *, profiled: bool = False
) -> tuple[int, ...]:
    """Of the watched steps those whose loss and gradient are computed a second time, ascending.

    The first, and of a launch of some length drawn pairs: time that counts for no step has to stay
    rare. `profiled`: a trace shows steps as they are, so it is the first alone.
    """
    steps = last - first + 1
    pairs = 0 if profiled else min(_drawn_pairs(steps), steps // _SHORT_STEPS_A_PAIR)
    begins = [_drawn_step(token, number, first, last) for number in range(pairs)]
    return tuple(sorted({first, *(step for begin in begins for step in (begin, begin + 1))}))


def drawn_batch(token: str, rank: int, step: int, batches: int) -> int:
    """Which of a rank's held-out batches, from 0, its evaluation after a step computes again."""
    return _below(batches, f"eval {rank} {step} {token}")


def _below(count: int, words: str) -> int:
    """A number from 0 to count - 1 that follows from the words; 0 where there is none."""
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % max(1, count)
