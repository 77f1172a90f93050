"""Kernel: compressed keys as sums of numbers that tensor cores multiply.

Compressed keys are means, kept in float32, and their scores choose blocks: a bf16 key would choose
others. So that tensor cores can multiply them all the same, a key is taken as a sum of TERMS
numbers of the queries' type, the largest first, and the products are added up: as exact as one
product of float32. The first term is the key rounded. Every tile reads the terms, so they are made
once for a call.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import load_block


@triton.jit
def terms_kernel(
    k, terms, groups, n_keys, k_b, k_t, k_g,
    D_K: tl.constexpr, WIDTH_K: tl.constexpr, TERMS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Terms [B,N,G,TERMS,D_K] of KEYS keys of one group. k: float32."""
    tile = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    rest = load_block(k + batch * k_b + group * k_g, k_t, tile, n_keys, KEYS, KEYS, D_K, WIDTH_K)
    key, dim = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH_K)
    to = terms + (((batch * n_keys + key.to(tl.int64)) * groups + group) * TERMS * D_K)[:, None]
    inside = (key < n_keys)[:, None] & (dim < D_K)[None, :]
    for term in tl.static_range(TERMS):
        part = rest.to(terms.dtype.element_ty)
        tl.store(to + term * D_K + dim[None, :], part, inside)
        rest -= part.to(tl.float32)
