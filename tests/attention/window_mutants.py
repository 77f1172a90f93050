"""Known defects of the window's and of decoding's kernels: path, text, its replacement."""

from __future__ import annotations

_WINDOW, _KEYS, _DECODE = "window.py", "window_keys.py", "decode.py"

WINDOW_MUTANTS: dict[str, tuple[str, str, str]] = {
    # Not seen: a control, which has to live.
    "window_control": (_WINDOW, "acc = acc * keep[:, None]", "acc  =  acc * keep[:, None]"),
    "one_token_too_far": (_WINDOW, "(key > token - w)", "(key >= token - w)"),
    "one_token_too_near": (_WINDOW, "(key > token - w)", "(key > token - w + 1)"),
    "window_blind_to_itself": (_WINDOW, "(key <= token)", "(key < token)"),
    "begins_one_key_late": (
        _WINDOW, "tl.maximum(first - w + 1, 0)", "tl.maximum(first - w + 2, 0)",
    ),
    "first_tile_taken_for_whole": (
        _WINDOW, "masked = tl.cdiv(tl.maximum(last - w + 1 - start, 0), KEYS)", "masked = 0",
    ),
    "last_tile_taken_for_whole": (
        _WINDOW, "(first + 1 - start) // KEYS, masked)",
        "tl.cdiv(last + 1 - start, KEYS), masked)",
    ),
    "ends_left_out": (_WINDOW, "in range(masked + end - whole)", "in range(end - whole)"),
    "ends_in_the_middle": (_WINDOW, "number, number - masked + whole", "number, number"),
    "window_sum_not_rescaled": (_WINDOW, "total * keep + tl.sum", "total + tl.sum"),
    "window_output_not_rescaled": (_WINDOW, "acc = acc * keep[:, None]", "acc = acc * 1.0"),
    "nothing_so_far": (_WINDOW, "tl.where(higher == NOTHING, 0.0, higher)", "higher"),
    "window_natural_logarithm": (_WINDOW, "best + tl.log2(total)", "best + tl.log(total)"),
    "window_delta_left_out": (_WINDOW, "(dp - delta[:, None])", "dp"),
    "scale_left_out_of_window_dq": (_WINDOW, "acc * dq_scale", "acc"),
    "window_first_group_for_all": (
        _WINDOW, "v += batch * v_b + group * v_g", "v += batch * v_b",
    ),
    "window_first_head_for_all": (
        "rows.py", "* groups + group) * HEADS + head", "* groups + group) * HEADS + 0",
    ),
    "readers_end_early": (
        _KEYS, "tl.minimum(last + w, seq_len) * HEADS",
        "tl.minimum(last + w - 1, seq_len) * HEADS",
    ),
    "readers_beyond_the_window": (_KEYS, "near(token[None, :], key[:, None], w) &", ""),
    "first_rows_taken_for_whole": (
        _KEYS, "masked = tl.cdiv((last - first) * HEADS, ROWS)", "masked = 0",
    ),
    "last_rows_taken_for_whole": (
        _KEYS, "whole = tl.maximum(whole, masked)", "whole = tl.cdiv(rows_end - begin, ROWS)",
    ),
    "window_delta_left_out_of_keys": (_KEYS, "(dp - theirs[None, :])", "dp"),
    "scale_left_out_of_window_dk": (_KEYS, "(sum_k * dk_scale)", "sum_k"),
    "masked_rows_of_a_piece_lost": (_KEYS, "in range(few + tl", "in range(tl"),
    "every_piece_walks_from_the_first": (_KEYS, "tl.maximum(masked, low)", "masked"),
    "pieces_end_late": (_KEYS, "end * (piece + 1) // n_pieces", "end"),
    "last_rows_of_every_piece": (_KEYS, "tl.maximum(whole, low)\n", "whole\n"),
    "pieces_in_one_place": (
        _KEYS, "of_piece = piece * (tl.num_programs(1) // groups)", "of_piece = 0",
    ),
    "first_piece_only": (_KEYS, "for piece in range(PIECES)", "for piece in range(1)"),
    "keys_in_one_place": (
        _KEYS, "first = tl.program_id(0) * KEYS", "first = tl.program_id(0) * 0",
    ),
}  # fmt: skip

DECODE_MUTANTS: dict[str, tuple[str, str, str]] = {
    "decode_control": (_DECODE, "best = higher", "best  =  higher"),
    "newest_token_left_out": (_DECODE, "(first + inner < length)", "(first + inner < length - 1)"),
    "no_block_read_as_the_first": (
        _DECODE, "tl.where(block < 0, length, block * L_SEL)", "tl.maximum(block, 0) * L_SEL",
    ),
    "overlap_not_weighted": (
        _DECODE, "tl.minimum(place + 1, PER_SEL) - tl.maximum(offset, 0)", "1",
    ),
    "one_block_further": (
        _DECODE, "key = block * PER_SEL + offset", "key = block * PER_SEL + place",
    ),
    "one_head_chooses": (_DECODE, "for head in range(HEADS):", "for head in range(1):"),
    "nothing_forced": (_DECODE, "forced = (block == 0) |", "forced = (block < 0) |"),
    "the_future_chosen": (_DECODE, "tl.where(block > current, NOTHING, found)", "found"),
    "chosen_again": (_DECODE, "tl.where(block == taken, NOTHING, found)", "found"),
    "parts_not_rescaled": (_DECODE, "read * theirs[:, None]", "read"),
    "gates_of_one_branch": (_DECODE, "tl.load(at + branch,", "tl.load(at,"),
    "last_part_lost": (
        _DECODE, "for part in range(begin, end)", "for part in range(begin, end - 1)",
    ),
    "parts_in_one_place": (
        _DECODE, "to = ((pair * n_parts + part) * ROWS", "to = ((pair * n_parts) * ROWS",
    ),
}  # fmt: skip
