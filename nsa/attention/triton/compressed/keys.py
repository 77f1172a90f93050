"""Kernel: compressed keys as sums of numbers that tensor cores multiply, and values rounded.

Compressed keys are means, kept in float32, and their scores choose blocks: a bf16 key would choose
others. So that tensor cores can multiply them all the same, a key is taken as a sum of TERMS
numbers of the queries' type, the largest first, and the products are added up: as exact as one
product of float32. The first term is the key rounded. Every tile reads the terms, so they are made
once for a call, and in the same launch values are rounded where the call reads them.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import load_keys


@triton.jit
def _store(
    base, rows, batch, group, first, n_keys, groups, SPACE: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Numbers [KEYS, WIDTH] into [B,N,G,SPACE], as far as they are of keys."""
    key, dim = first + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    to = ((batch * n_keys + key.to(tl.int64)) * groups + group) * SPACE
    tl.store(base + to[:, None] + dim[None, :], rows, (key < n_keys)[:, None] & (dim < D)[None, :])


@triton.jit
def terms_kernel(
    k, v, terms, values, groups, n_keys, k_b, k_t, k_g, v_b, v_t, v_g,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    TERMS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Terms [B,N,G,TERMS,D_K] of KEYS keys of one group; with VALUES, values [B,N,G,D_V] too.

    k, v: float32.
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    kind = terms.dtype.element_ty
    rest = load_keys(k + batch * k_b + group * k_g, k_t, tile * KEYS, n_keys, KEYS, D_K, WIDTH_K)
    for term in tl.static_range(TERMS):
        part = rest.to(kind)
        _store(
            terms + term * D_K, part, batch, group, tile * KEYS, n_keys, groups, TERMS * D_K, D_K,
            KEYS, WIDTH_K,
        )  # fmt: skip
        rest -= part.to(tl.float32)
    if VALUES:
        whole = load_keys(
            v + batch * v_b + group * v_g, v_t, tile * KEYS, n_keys, KEYS, D_V, WIDTH_V
        )  # fmt: skip
        _store(
            values, whole.to(kind), batch, group, tile * KEYS, n_keys, groups, D_V, D_V, KEYS,
            WIDTH_V,
        )  # fmt: skip
