"""The selected branch's kernels: what they compute, and the lists of each block's readers.

`core` takes the launching module as an argument, so that a copy with a planted defect is judged
like it. Lists are held against ones that are written out token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from nsa.attention.selection import block_bits, ranges_v1
from nsa.attention.triton.selected_tiles import ByBlock, Cut
from nsa.attention.triton.tiles import Tile
from tests.attention.triton_kernels import (
    LAUNCH,
    Shape,
    alone,
    branch,
    cut_as,
    held,
    inputs,
    of_blocks,
    poisoned,
    with_gradients,
    written_once,
)


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """Of the selected branch, and how its work is cut; rows, piece: of tiles.Cut.

    run: positions that blocks own at a time; with 0 queries walk.
    """

    l_sel: int = 8
    n_sel: int = 4
    rows: int = 64
    piece: int = 16
    run: int = 0
    # No compression block is complete.
    l = property(lambda self: (self.seq_len // self.l_sel + 1) * self.l_sel)  # noqa: E741
    d = property(lambda self: self.l_sel)
    w = 1

    def cut(self) -> Cut:
        """As asked, whatever the cost model would say."""
        tile, n_blocks = Tile(rows=self.rows, warps=1, stages=1), self.config().n_blocks
        return Cut(
            forward=tile, query_gradient=tile, key_gradient=tile, piece=self.piece,
            n_blocks=n_blocks(self.seq_len),
            readers=self.seq_len * min(self.n_sel, n_blocks(self.seq_len)),
            by_block=self.by_block() if self.run else None,
        )  # fmt: skip

    def by_block(self) -> ByBlock:
        """The form in which blocks own the work."""
        tile, n_blocks = Tile(rows=self.rows, warps=1, stages=1), self.config().n_blocks
        places = min(self.n_sel, n_blocks(self.seq_len))
        return ByBlock(
            forward=tile, query_gradient=tile, merge=tile, tokens=self.run, places=places,
            piece=self.piece, n_blocks=n_blocks(self.seq_len),
        )  # fmt: skip


# Between them: tiles of one token and of many, heads that fill no tile, more than one
# word of bits, pieces that end inside a list, a last block that is cut, S below one block.
CORE = (
    Case(seq_len=5, heads=1, batch=2, l_sel=8, d_k=3, d_v=5, rows=16),
    Case(seq_len=71, heads=3, groups=2, l_sel=2, n_sel=5, d_k=24, d_v=8, rows=128),
    Case(seq_len=71, heads=3, l_sel=2, n_sel=4, rows=16, piece=32),
    # Blocks own the work: runs that end inside a block, and a second word of bits.
    Case(seq_len=21, heads=3, groups=2, l_sel=4, n_sel=3, d_k=24, d_v=8, rows=32, run=14),
    Case(seq_len=40, heads=1, l_sel=1, rows=32, run=28, piece=64),
)
# Which of them are of that form.
BY_BLOCK = CORE[3:]


def selection(case: Case) -> Tensor:
    """Blocks [B,S,G,n] by the rules, the free ones at random; token 3 reads nothing at all."""
    rng = np.random.default_rng(case.seq_len)
    shape = (case.batch, case.seq_len, case.groups, case.n_sel)
    blocks = np.full(shape, -1, dtype=np.int64)
    for b, t, g in np.ndindex(*shape[:3]):
        current = t // case.l_sel
        taken = {0, current, max(0, current - 1)}
        free = [j for j in range(current + 1) if j not in taken]
        room = min(case.n_sel - len(taken), len(free))
        taken |= set(rng.choice(free, room, replace=False).tolist()) if room > 0 else set()
        blocks[b, t, g, : len(taken)] = sorted(taken)
    blocks[:, 3] = -1
    return torch.from_numpy(blocks)


def right(case: Case) -> dict[str, Tensor]:
    """Everything in float64."""
    seen = of_blocks(selection(case), case.l_sel)
    return with_gradients(case, inputs(case), partial(branch, seen=seen))


def found_by(launch: ModuleType, case: Case, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The same by the kernels."""
    cfg = case.config()
    with cut_as(launch, selected=case.cut()):
        bits = block_bits(ranges_v1(selection(case), cfg), cfg)
        return alone(launch, 1, cfg, tensors, bits)


def core(launch: ModuleType = LAUNCH, cases: tuple[Case, ...] = CORE) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    return held(launch, cases, found_by, right)


# Between them: one token, S odd and cut anywhere by blocks and runs, both forms, several pairs,
# more than 32 blocks, runs without a reader of most blocks.
LISTS = (
    Case(seq_len=1, heads=1, run=64),
    Case(seq_len=37, heads=1, batch=2, groups=2, l_sel=4, n_sel=3, run=14),
    Case(seq_len=41, heads=1, l_sel=1, n_sel=7, run=30),
    Case(seq_len=67, heads=1, l_sel=2, n_sel=5),
)
# Of the whole sequence and of a run.
_PIECES = (5, 3)


def list_problems(launch: ModuleType = LAUNCH, cases: tuple[Case, ...] = LISTS) -> list[str]:
    """What a `core` lists wrongly, writes twice, or leaves unwritten."""
    problems: list[str] = []
    for case in cases:
        cfg, blocks = case.config(), _choices(case)
        cut = replace(case.cut(), piece=_PIECES[0])
        if cut.by_block:
            places = max(2, cut.by_block.places)
            cut = replace(cut, by_block=replace(cut.by_block, piece=_PIECES[1], places=places))
        with written_once(problems), poisoned():
            bits = block_bits(_ranges(case, blocks), cfg)
            made = launch.selected.lists_of(bits, cfg, cut)
        found = {name: getattr(made, name) for name in ("readers", "counts", "offsets", "ends")}
        arrays = {name: x.numpy() for name, x in found.items()}
        for pair, chosen in enumerate(blocks):
            of_pair = {name: x[:, pair] for name, x in arrays.items() if name != "readers"}
            wrong = _wrong(case, chosen, made.places, arrays["readers"][pair], **of_pair)
            problems += [f"{case}, pair {pair}: {text}" for text in wrong]
            counted = [len(taken) for taken in chosen]
            if made.places > 1 and made.read[pair].tolist() != counted:
                problems.append(f"{case}, pair {pair}: how many blocks a query reads")
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
    for pair, chosen in enumerate(blocks):
        for token, taken in enumerate(chosen):
            for place, block in enumerate(taken):
                begin = block * case.l_sel
                end = min(begin + case.l_sel, token + 1)
                ranges[pair, token, place] = torch.tensor([begin, end])
    return ranges.unflatten(0, (case.batch, case.groups)).transpose(1, 2)


def _wrong(
    case: Case, chosen: list[list[int]], places: int, readers: np.ndarray, *,
    counts: np.ndarray, offsets: np.ndarray, ends: np.ndarray,
) -> list[str]:  # fmt: skip
    """Of one pair; list 0 is of all tokens, the others of one run each."""
    runs = [(0, case.seq_len)]
    tokens = min(case.run, case.seq_len) or case.seq_len
    runs += [(b, min(b + tokens, case.seq_len)) for b in range(0, case.seq_len, tokens)]
    if len(counts) != len(runs):
        return [f"{len(counts)} lists, not {len(runs)}"]
    problems, used = [], 0
    for number, (begin, end) in enumerate(runs):
        piece = _PIECES[1] if number and case.run else _PIECES[0]
        n_pieces = 0
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
