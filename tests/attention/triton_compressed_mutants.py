"""Known defects of the compressed branch's kernels, as in `triton_mutants`."""

from __future__ import annotations

_ROWS, _COLUMNS, _TOP = "compressed_rows.py", "compressed_columns.py", "top.py"
_KEYS = "compressed_keys.py"
# What the rows of all branches have in common.
_ALL_ROWS = "rows.py"

MUTANTS: dict[str, tuple[str, str, str]] = {
    # Not seen: a control, which has to live.
    "compressed_control": (_ROWS, "empty = total == 0.0", "empty  =  total  ==  0.0"),
    "sees_before_the_end": (_ROWS, "key * STRIDE + L - 1", "key * STRIDE + L - 2"),
    "last_key_lost": (_ROWS, "(token + 1 - L) // STRIDE + 1", "(token + 1 - L) // STRIDE"),
    "keys_rounded": (_ROWS, "tl.static_range(1, TERMS)", "tl.static_range(0)"),
    "one_term_twice": (_KEYS, "rest -= part.to(tl.float32)", "rest = rest"),
    "rounded_scores_choose": (_ROWS, "tl.exp2(exact * scale", "tl.exp2(scores * scale"),
    "gradients_of_the_exact_sum": (_ROWS, "tl.log2(tl.where(empty, 1.0, total))",
                                   "tl.log2(tl.where(empty, 1.0, exact_total))"),
    "compressed_delta_left_out": (_ROWS, "(dp - delta[:, None])", "dp"),
    "compressed_scale_left_out_of_dq": (_ROWS, "acc * dq_scale", "acc"),
    "compressed_another_head": (_ALL_ROWS, "row // HEADS, row % HEADS", "row // HEADS, row * 0"),
    "compressed_first_group": (_ROWS, " k += batch * k_b + group * k_g", " k += batch * k_b"),
    "terms_of_the_first_group": (_ROWS, "terms += batch * k_b + group * k_g",
                                 "terms += batch * k_b"),
    "too_few_keys_masked": (_ROWS, "// KEYS * KEYS", "// KEYS * KEYS + KEYS"),
    "compressed_pieces_in_one_place": (_COLUMNS, "* n_pieces + piece\n", "* n_pieces\n"),
    "first_token_lost": (_COLUMNS, "* STRIDE + L - 1)\n", "* STRIDE + L)\n"),
    "delta_left_out_of_compressed_keys": (_COLUMNS, "(dp - mine[None, :])", "dp"),
    "compressed_first_piece_lost": (_COLUMNS, "for piece in range((", "for piece in range(1 + ("),
    "too_few_rows_masked": (_COLUMNS, "masked = begin + ", "masked = begin + 0 * "),
    "scale_left_out_of_compressed_dk": (_COLUMNS, "total_k * dk_scale", "total_k"),
    "weights_of_one": (_TOP, "tl.maximum(weight, 0)", "tl.minimum(tl.maximum(weight, 0), 1)"),
    "read_one_based": (_TOP, "(first + column // STEPS)", "(first + 1 + column // STEPS)"),
    "first_head_chooses": (_TOP, "for head in range(heads)", "for head in range(1)"),
    "sums_left_out": (_TOP, "exact * scale - sums[:, None]", "exact * scale"),
    "nothing_reaches_later_blocks": (_TOP, "STEPS) + moved, carry", "STEPS), carry"),
    "nothing_reaches_the_next_run": (_TOP, "last[:, None], carry)", "0.0, carry)"),
    "reaches_one_block_only": (_TOP, "STEPS) + moved\n", "STEPS)\n"),
    "one_local_block": (_TOP, "(age < LOCAL)", "(age < 1)"),
    "no_initial_block": (_TOP, "(block < INITIAL)[None, :] | (age", "(age"),
    "sees_later_blocks": (_TOP, "tl.where(age >= 0, scores, NOTHING)", "scores"),
    "first_run_forgotten": (_TOP, "best, held = _insert(best,",
                            "best, held = _insert(tl.zeros_like(best) + empty[None, :],"),
    "more_than_n": (_TOP, "tl.where(place < N_SEL, -1.0", "tl.where(place >= 0, -1.0"),
    "everything_for_too_long": (_TOP, "if last < N_SEL * L_SEL", "if last < 2 * N_SEL * L_SEL"),
    "not_in_order": (_TOP, "found = tl.sort(found, 1)", "found = found"),
}  # fmt: skip

# Seen only where scores are equal.
OF_EQUALS = {
    "last_of_equals_enters": (_TOP, "enters = tl.min(tl.where(scores == highest[:, None], "
                              "block[None, :], _NO_BLOCK)",
                              "enters = tl.max(tl.where(scores == highest[:, None], "
                              "block[None, :], -1)"),
    "first_of_equals_leaves": (_TOP, "tl.max(tl.where(best == lowest[:, None], held, -1)",
                               "tl.min(tl.where(best == lowest[:, None], held, _NO_BLOCK)"),
}  # fmt: skip
# What only one program may write is written by several.
RACES = ("compressed_another_head", "compressed_pieces_in_one_place")
# Offsets that wrap around.
IN_32_BITS = {
    "queries_in_32_bits": (_ALL_ROWS, "far = token.to(tl.int64)", "far = token"),
    "keys_in_32_bits": (_ALL_ROWS, "token.to(tl.int64)[:, None] * stride",
                        "token[:, None] * stride"),
}  # fmt: skip
