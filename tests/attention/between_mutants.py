"""Known defects of the kernels between the branches, as in `triton_mutants`."""

from __future__ import annotations

_MIX, _RANGES, _POOL = "mix.py", "ranges.py", "pool.py"

MIX_MUTANTS: dict[str, tuple[str, str, str]] = {
    # Not seen: a control, which has to live.
    "mix_control": (_MIX, "opened = tl.load(", "opened  =  tl.load("),
    "selected_gate_for_all": (_MIX, "of_win = tl.load(gate + 2,", "of_win = tl.load(gate + 1,"),
    "window_left_out": (_MIX, "mixed += of_win[:, None] *", "mixed += 0 *"),
    "the_first_branch_again": (_MIX, "sel, batch, token, head, inside, sel_b, sel_t, sel_h, D_V, "
                               "WIDTH_V\n", "cmp, batch, token, head, inside, cmp_b, cmp_t, "
                               "cmp_h, D_V, WIDTH_V\n"),
    "first_batch_for_all": (_MIX, "base + batch * of_batch, of_token", "base, of_token"),
    "first_gates_for_all": (_MIX, "d_gate = d_gates + number * 3",
                            "gate, d_gate = gates + token * 0, d_gates + number * 3"),
    "gradient_not_gated": (_MIX, "grads * opened[:, None]", "grads"),
    "gate_by_its_own_gradient": (_MIX, "tl.sum(grads * branch, 1)", "tl.sum(grads * grads, 1)"),
    "gates_swapped_backward": (_MIX, "d_gate + 2, number", "d_gate + 1, number"),
    "last_number_lost": (_MIX, "& (dim < D)[None, :]", "& (dim < D - 1)[None, :]"),
    "sequence_not_masked": (_MIX, "inside = row < seq_len * HEADS",
                            "inside = row < seq_len * HEADS - 1"),
    "mix_tiles_in_one_place": (_MIX, "row = tl.program_id(0) * ROWS +", "row = 0 * ROWS +"),
}  # fmt: skip

RANGES_MUTANTS: dict[str, tuple[str, str, str]] = {
    "ranges_control": (_RANGES, "current = token", "current  =  token"),
    "first_run_begins_again": (_RANGES, "run = tl.cumsum(opens.to(tl.int32), 1) - 1",
                               "run = tl.maximum(tl.cumsum(opens.to(tl.int32), 1) - 2, 0)"),
    "the_future_is_seen": (_RANGES, "& (block <= current)", "& (block <= current + 1)"),
    "the_future_goes_on": (_RANGES, "& (after <= current) ", ""),
    "no_block_goes_on": (_RANGES, "(after >= 0) & ", ""),
    "merged_over_a_gap": (_RANGES, "(block - before > 1)", "((block - before > 2) | (place == 0))"),
    "gaps_go_on": (_RANGES, "(after - block <= 1)", "(after - block <= 2)"),
    "the_next_place_is_anothers": (_RANGES, "(place < N_SEL - 1)", "(place < N_SEL)"),
    "one_token_ahead": (_RANGES, "token + 1)", "token + 2)"),
    "unused_left_as_they_were": (_RANGES, "nothing, unused)\n    tl.store(ranges + at * 2 + 1",
                                 "nothing, place < 0)\n    tl.store(ranges + at * 2 + 1"),
    "zeros_over_everything": (_RANGES, "unused = inside & (place >= tl.sum(opens.to(tl.int32), 1)"
                              "[:, None])", "unused = inside"),
    "token_of_one_group": (_RANGES, "token = (row // groups)", "token = row"),
    "ranges_of_one_batch": (_RANGES, "tl.program_id(1).to(tl.int64) * n_rows", "0 * n_rows"),
}  # fmt: skip

POOL_MUTANTS: dict[str, tuple[str, str, str]] = {
    "pool_control": (_POOL, "block = token // STRIDE - age", "block  =  token // STRIDE - age"),
    "the_block_before": (_POOL, "block * STRIDE * x_t", "(block - (block > 0)) * STRIDE * x_t"),
    "one_token_more": (_POOL, "(token < L)[:, None]", "(token <= L)[:, None]"),
    "first_tokens_only": (_POOL, "in range(0, L, TOKENS)", "in range(0, TOKENS, TOKENS)"),
    "sum_for_mean": (_POOL, "total / L, dim < D", "total, dim < D"),
    "values_of_keys": (_POOL,
                       "_mean(v, pooled_v, v_b, v_t, v_g,", "_mean(k, pooled_v, k_b, k_t, k_g,"),
    "pool_first_group": (_POOL, "x += batch * x_b + group * x_g", "x += batch * x_b"),
    "last_block_only": (_POOL, "in range(L // STRIDE)", "in range(1)"),
    "one_block_more": (_POOL, "in range(L // STRIDE)", "in range(L // STRIDE + 1)"),
    "blocks_that_do_not_exist": (_POOL, "(block < n_blocks)", "(block <= n_blocks)"),
    "blocks_before_the_first": (_POOL, "(block >= 0) & ", ""),
    "gradient_of_the_sum": (_POOL, "(total / L).to", "total.to"),
    "pool_of_one_pair": (_POOL, "at = ((batch * n_blocks + block) * groups + group) * D + dim",
                         "at = (batch * n_blocks + block) * groups * D + dim"),
    "pool_gradients_in_one_place": (_POOL, "token = tl.program_id(0) * TOKENS +", "token ="),
}  # fmt: skip

# What only one program may write is written by several.
RACES = {
    "mix_tiles_in_one_place", "ranges_of_one_batch", "pool_of_one_pair",
    "pool_gradients_in_one_place",
}  # fmt: skip
# Offsets that wrap around.
MIX_IN_32_BITS = {"mix_in_32_bits": (_MIX, "(row % HEADS).to(tl.int64)", "row % HEADS")}
POOL_IN_32_BITS = {
    "pool_in_32_bits": (_POOL, "token.to(tl.int64)[:, None] * x_t", "token[:, None] * x_t"),
}
