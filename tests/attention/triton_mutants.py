"""Known defects of kernels, one at a time: path in nsa/attention/triton, text, its replacement."""

from __future__ import annotations

# Seen where blocks own the work.
BY_BLOCK_MUTANTS: dict[str, tuple[str, str, str]] = {
    "parts_blind_to_themselves": ("blocks.py", "key[None, :] <= token", "key[None, :] < token"),
    "part_not_divided": ("blocks.py", "part * (1.0 / total)[:, None], to", "part, to"),
    "parts_in_one_place": ("blocks.py", "* PLACES + place) * HEADS", "* PLACES) * HEADS"),
    "merge_not_rescaled": ("blocks.py", "acc = acc * mine[:, None]", "acc = acc"),
    "last_place_lost": ("blocks.py", "in range(PLACES)", "in range(PLACES - 1)"),
    "parts_of_nobody": ("blocks.py", "place < n_parts", "place <= n_parts"),
    "scale_left_out_of_parts": ("blocks.py", ' * dq_scale\n', "\n"),
    "delta_left_out_of_parts": ("blocks.py", "(dp - theirs[:, None])", "dp"),
    "runs_from_the_first_token": ("blocks.py", "begin * HEADS + row", "row"),
    "places_left_in_tokens": ("columns.py", "entry // PLACES, -1", "entry, -1"),
}  # fmt: skip

# Seen in the lists: attention by some of these lists would read where nothing is.
LIST_MUTANTS: dict[str, tuple[str, str, str]] = {
    "list_moved_by_one": ("index.py", "tl.cumsum(reads, 0) - reads", "tl.cumsum(reads, 0)"),
    "lists_of_runs_in_one_place": ("index.py", "- total + earlier", "- total"),
    "runs_begin_where_they_end": ("index.py", "where(1 + run < number", "where(run < number"),
    "runs_cut_like_the_whole": ("index.py", "= (mine + piece", "= (total + piece"),
    "pieces_of_one_length": ("index.py", "PIECE, PIECE_OF_RUN)", "PIECE, PIECE)"),
    "runs_end_with_the_sequence": ("index.py", "tl.minimum(begin + tokens, seq_len)", "seq_len"),
    "places_of_one_word": (
        "index.py", "others.to(tl.int32) + _ones(words & lower)", "_ones(words & lower)",
    ),
}  # fmt: skip

MUTANTS: dict[str, tuple[str, str, str]] = {
    # Not seen: a control, which has to live.
    "control": ("rows.py", "acc = acc * keep[:, None]", "acc  =  acc * keep[:, None]"),
    "blind_to_itself": ("rows.py", "(key[None, :] <= token", "(key[None, :] < token"),
    "reads_everything": ("rows.py", "return reads[:, None] & (inner", "return (inner"),
    "output_not_rescaled": ("rows.py", "acc = acc * keep[:, None]", "acc = acc * 1.0"),
    "sum_not_rescaled": ("rows.py", "total * keep + tl.sum", "total + tl.sum"),
    "first_word_twice_every": ("rows.py", "(block // 32) * seq_len", "(block // 64) * seq_len"),
    "first_word_twice_union": ("rows.py", "word * 32 + lowest", "lowest"),
    "one_row_for_all": ("rows.py", "rest = union(words)", "rest = tl.max(words, 0)"),
    "nothing_less_nothing": ("rows.py", "tl.where(higher == NOTHING, 0.0, higher)", "higher"),
    "natural_logarithm": ("rows.py", "tl.log2(tl.where", "tl.log(tl.where"),
    "delta_left_out": ("rows.py", "(dp - delta[:, None])", "dp"),
    "scale_left_out_of_dq": ("rows.py", "acc * dq_scale", "acc"),
    "another_head": ("rows.py", "row // HEADS, row % HEADS", "row // HEADS, row * 0"),
    "first_group_for_all": ("rows.py", "k += batch * k_b + group * k_g", "k += batch * k_b"),
    "last_block_left_out": ("rows.py", "range(last + 1)", "range(last)"),
    "pieces_in_one_place": (
        "columns.py", "to = parts + (pair * n_pieces + piece)", "to = parts + (pair * n_pieces)",
    ),
    "keys_blind_to_themselves": ("columns.py", "key[:, None] <= token", "key[:, None] < token"),
    "delta_left_out_of_keys": ("columns.py", "(dp - theirs[None, :])", "dp"),
    "first_piece_lost": ("columns.py", "in range(first,", "in range(first + 1,"),
    "every_piece_from_the_start": ("columns.py", "+ skipped\n", "\n"),
    "pieces_overlap": ("columns.py", "- skipped, PIECE) * HEADS", ", PIECE) * HEADS"),
    "scale_left_out_of_dk": ("columns.py", "(total_k * dk_scale)", "total_k"),
    "current_block_lost": ("index.py", "(end + L_SEL - 1) // L_SEL", "end // L_SEL"),
    "bit_31_lost": ("index.py", "tl.where(high > low,", "tl.where((high > low) & (high < 32),"),
    **BY_BLOCK_MUTANTS,
    **LIST_MUTANTS,
}  # fmt: skip
