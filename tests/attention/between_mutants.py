"""Known defects of the kernels between the branches, as in `triton_mutants`."""

from __future__ import annotations

_MIX = "mix.py"

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

# What only one program may write is written by several.
RACES = {"mix_tiles_in_one_place"}
# Offsets that wrap around.
IN_32_BITS = ("mix_in_32_bits", _MIX, "(row % HEADS).to(tl.int64)", "row % HEADS")
