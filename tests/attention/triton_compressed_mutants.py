"""Known defects of the compressed branch's kernels, as in `triton_mutants`."""

from __future__ import annotations

_ROWS, _COLUMNS, _TOP = "compressed_rows.py", "compressed_columns.py", "top.py"
# What the rows of all branches have in common.
_ALL_ROWS = "rows.py"

MUTANTS: dict[str, tuple[str, str, str]] = {
    # Not seen: a control, which has to live.
    "compressed_control": (_ROWS, "empty = total == 0.0", "empty  =  total  ==  0.0"),
    "sees_before_the_end": (_ROWS, "key * STRIDE + L - 1", "key * STRIDE + L - 2"),
    "last_key_lost": (_ROWS, "(token + 1 - L) // STRIDE + 1", "(token + 1 - L) // STRIDE"),
    "keys_rounded": (_ROWS, "tl.static_range(TERMS - 1)", "tl.static_range(0)"),
    "rounded_scores_choose": (_ROWS, "tl.exp2(exact - shift", "tl.exp2(scores - shift"),
    "gradients_of_the_exact_sum": (_ROWS, "tl.log2(tl.where(empty, 1.0, total))",
                                   "tl.log2(tl.where(empty, 1.0, exact_total))"),
    "compressed_delta_left_out": (_ROWS, "(dp - mine[:, None])", "dp"),
    "compressed_scale_left_out_of_dq": (_ROWS, "acc * dq_scale", "acc"),
    "compressed_another_head": (_ALL_ROWS, "row // HEADS, row % HEADS", "row // HEADS, row * 0"),
    "compressed_first_group": (_ROWS, "k += batch * k_b + group * k_g", "k += batch * k_b"),
    "compressed_pieces_in_one_place": (_COLUMNS, "* n_pieces + piece\n", "* n_pieces\n"),
    "first_token_lost": (_COLUMNS, "* STRIDE + L - 1)\n", "* STRIDE + L)\n"),
    "delta_left_out_of_compressed_keys": (_COLUMNS, "(dp - theirs[None, :])", "dp"),
    "compressed_first_piece_lost": (_COLUMNS, "for piece in range((", "for piece in range(1 + ("),
    "scale_left_out_of_compressed_dk": (_COLUMNS, "total_k * dk_scale", "total_k"),
    "weights_of_one": (_TOP, "weight.to(tl.float32) * ", ""),
    "read_one_based": (_TOP, "key = block * STEP + offset", "key = (block + 1) * STEP + offset"),
    "first_head_chooses": (_TOP, "for head in range(HEADS)", "for head in range(1)"),
    "sums_left_out": (_TOP, "* scale - sums[:, None]", "* scale"),
    "one_local_block": (_TOP, "(age < LOCAL)", "(age < 1)"),
    "no_initial_block": (_TOP, "(block < INITIAL)[None, :] | (age", "(age"),
    "sees_later_blocks": (_TOP, "tl.where(age >= 0, order, -1)", "order"),
    "first_run_forgotten": (_TOP, "tl.maximum(best, tl.topk(order, PLACES))",
                            "tl.topk(order, PLACES)"),
    "more_than_n": (_TOP, "(place >= PLACES - N_SEL)", "(place >= 0)"),
    "everything_for_too_long": (_TOP, "if last < N_SEL * L_SEL", "if last < 2 * N_SEL * L_SEL"),
    "not_in_order": (_TOP, "found = tl.sort(found, 1)", "found = found"),
}  # fmt: skip

# What only one program may write is written by several.
RACES = ("compressed_another_head", "compressed_pieces_in_one_place")
# Offsets that wrap around.
IN_32_BITS = {
    "queries_in_32_bits": (_ALL_ROWS, "far = token.to(tl.int64)", "far = token"),
    "keys_in_32_bits": (_TOP, "key.to(tl.int64)[:, None] * k_t", "key[:, None] * k_t"),
    "columns_in_32_bits": (_COLUMNS, "far = token.to(tl.int64)", "far = token"),
}
