"""The lists of each block's readers, held against ones that are written out token by token."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from nsa.attention.selection import block_bits
from tests.attention.triton_cases import Case
from tests.attention.triton_kernels import LAUNCH, poisoned, written_once

# Between them: one token, S odd and cut anywhere by blocks and runs, both forms, several pairs,
# more than 32 blocks, runs without a reader of most blocks.
LISTS = (
    Case(seq_len=1, run=64),
    Case(seq_len=37, batch=2, groups=2, l=4, l_sel=4, n_sel=3, run=14),
    Case(seq_len=41, l=1, d=1, l_sel=1, n_sel=7, run=30),
    Case(seq_len=67, l=2, d=2, l_sel=2, n_sel=5),
)
# Readers in a piece, of the whole sequence and of a run.
_PIECES = (5, 3)


def list_problems(launch: ModuleType = LAUNCH) -> list[str]:
    """What a `core` lists wrongly, writes twice, or leaves unwritten."""
    problems: list[str] = []
    for case in LISTS:
        cut = replace(case.cuts().get("selected") or replace(case, rows=64).cuts()["selected"],
                      piece=_PIECES[0])  # fmt: skip
        if cut.by_block:
            places = max(2, cut.by_block.places)
            cut = replace(cut, by_block=replace(cut.by_block, piece=_PIECES[1], places=places))
        blocks, cfg = _choices(case), case.config()
        with written_once(problems), poisoned():
            made = launch.selected.lists_of(block_bits(_ranges(case, blocks), cfg), cfg, cut)
        for pair, chosen in enumerate(blocks):
            of_pair = [x[:, pair].numpy() for x in (made.counts, made.offsets, made.ends)]
            wrong = _wrong(case, chosen, made.places, made.readers[pair].numpy(), *of_pair)
            if made.places > 1 and made.read[pair].tolist() != [len(taken) for taken in chosen]:
                wrong.append("how many blocks a query reads")
            problems += [f"{case}, pair {pair}: {text}" for text in wrong]
    return problems


def _choices(case: Case) -> list[list[list[int]]]:
    """Blocks that each token of each pair reads, any that it sees: none, too."""
    rng = np.random.default_rng(case.seq_len)

    def of_token(token: int) -> list[int]:
        seen = token // case.l_sel + 1
        taken = rng.choice(seen, min(seen, rng.integers(case.n_sel + 1)), replace=False)
        return sorted(int(block) for block in taken)

    pairs = range(case.batch * case.groups)
    return [[of_token(token) for token in range(case.seq_len)] for _ in pairs]


def _ranges(case: Case, blocks: list[list[list[int]]]) -> Tensor:
    """The same as token ranges [B,S,G,n,2]; an empty one reads nothing."""
    ranges = torch.zeros(len(blocks), case.seq_len, case.n_sel, 2, dtype=torch.int64)
    for pair, token in np.ndindex(len(blocks), case.seq_len):
        for place, block in enumerate(blocks[pair][token]):
            begin = block * case.l_sel
            end = min(begin + case.l_sel, token + 1)
            ranges[pair, token, place] = torch.tensor([begin, end])
    return ranges.unflatten(0, (case.batch, case.groups)).transpose(1, 2)


def _wrong(
    case: Case, chosen: list[list[int]], places: int, readers: np.ndarray, counts: np.ndarray,
    offsets: np.ndarray, ends: np.ndarray,
) -> list[str]:  # fmt: skip
    """Of one pair; list 0 is of all tokens, the others of one run each."""
    s, tokens = case.seq_len, min(case.run, case.seq_len) or case.seq_len
    runs = [(0, s), *((begin, min(begin + tokens, s)) for begin in range(0, s, tokens))]
    if len(counts) != len(runs):
        return [f"{len(counts)} lists, not {len(runs)}"]
    problems, used = [], 0
    for number, (begin, end) in enumerate(runs):
        piece, n_pieces = _PIECES[bool(number and case.run)], 0
        for block in range(counts.shape[1]):
            truth = [
                token * places + (chosen[token].index(block) if places > 1 else 0)
                for token in range(begin, end)
                if block in chosen[token]
            ]
            n_pieces += -(-len(truth) // piece)
            first = offsets[number, block]
            listed = readers[first : first + counts[number, block]].tolist()
            if listed != truth or ends[number, block] != n_pieces:
                problems.append(f"list {number}, block {block}")
            # Lists of blocks share no room.
            if number == 0 and first != used:
                problems.append(f"block {block} begins at {first}, not {used}")
            used += len(truth) if number == 0 else 0
    return problems
