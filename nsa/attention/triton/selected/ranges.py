"""Kernel: chosen blocks as merged ranges of tokens, the same numbers as `selection.ranges_v2`.

Chosen blocks ascend, and missing ones are at the end: which block begins a run of neighbors and
which one ends it is seen from the blocks beside it, and a run's place is how many began before it.
So every number has one writer, and nothing is sorted.
"""

import triton
import triton.language as tl


@triton.jit
def ranges_kernel(
    blocks, ranges, n_rows, groups,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Ranges int64 [B,S,G,N_SEL,2] of blocks int64 [B,S,G,N_SEL]; n_rows: S*G of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PLACES)[None, :]
    token = (row // groups)[:, None]
    inside = (row < n_rows)[:, None] & (place < N_SEL)
    first = (tl.program_id(1).to(tl.int64) * n_rows + row)[:, None] * N_SEL
    at = first + place
    block = tl.load(blocks + at, inside, -1).to(tl.int32)
    # What lies before the first one is no neighbor of block 0.
    before = tl.load(blocks + at - 1, inside & (place > 0), -2).to(tl.int32)
    after = tl.load(blocks + at + 1, inside & (place < N_SEL - 1), -1).to(tl.int32)
    current = token // L_SEL
    seen = (block >= 0) & (block <= current)
    opens = seen & (block - before > 1)
    goes_on = (after >= 0) & (after <= current) & (after - block <= 1)
    run = tl.cumsum(opens.to(tl.int32), 1) - 1
    to = ranges + (first + run) * 2
    tl.store(to, (block * L_SEL).to(tl.int64), opens)
    end = tl.minimum(block * L_SEL + L_SEL, token + 1).to(tl.int64)
    tl.store(to + 1, end, seen & (goes_on == 0))
    unused = inside & (place >= tl.sum(opens.to(tl.int32), 1)[:, None])
    nothing = tl.zeros((ROWS, PLACES), tl.int64)
    tl.store(ranges + at * 2, nothing, unused)
    tl.store(ranges + at * 2 + 1, nothing, unused)
