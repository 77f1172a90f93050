"""Every Triton kernel as a call of a given shape launches it: function, constants, options.

Each part of attention is a function of the config, the length and the pairs = batch x kv groups;
`compiled` compiles what it gives. None is called before triton is known to be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa.attention.triton import (
    ByBlock,
    Tile,
    choose_compressed_cut,
    choose_selected_cut,
    choose_window_cut,
)
from nsa.config import NSAConfig

# Arguments that point to numbers of the call's own type.
_OWN = (
    "q", "k", "v", "out", "grad", "dq", "dk", "dv", "k_win", "v_win", "k_cmp", "v_cmp", "k_sel",
    "v_sel", "win", "sel", "terms", "values", "gates", "mixed", "d_gates", "dk_sel", "dv_sel",
    "dk_cmp", "dv_cmp", "dk_win", "dv_win", "dq_parts", "rounded_grad",
)  # fmt: skip
# Triton's type of what others point to: the compressed branch is float32 in every call, and its
# keys where they choose.
_POINTERS = {
    **dict.fromkeys(("bits", "counts", "offsets", "readers", "piece_ends", "read"), "i32"),
    **dict.fromkeys(("lse", "exact_lse", "cmp_lse", "sel_lse", "win_lse", "delta", "sums"), "fp32"),
    **dict.fromkeys(("parts", "selected_parts", "compressed_parts", "cmp"), "fp32"),
    "before": "i8",
    "blocks": "i64",
}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel as it is compiled: its function, its constants, its options.

    pointers: Triton's type of each argument that points to something else than the call's type.
    own: arguments that point to numbers of the call's type, unless `pointers` has them.
    dots: it multiplies on tensor cores.
    """

    name: str
    function: Any
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    dots: bool = False
    pointers: Mapping[str, str] = field(default_factory=lambda: _POINTERS)
    own: tuple[str, ...] = _OWN

    def type_of(self, argument: str, dtype: str) -> str:
        """Triton's word for the type of an argument, in a call of type `dtype`."""
        if argument in self.constants:
            return "constexpr"
        if argument in self.pointers:
            return f"*{self.pointers[argument]}"
        if argument in self.own:
            return f"*{dtype}"
        return "fp32" if argument.endswith("scale") else "i32"


def _tiled(name: str, function: Any, tile: Tile, constants: dict[str, Any], **more: Any) -> Kernel:
    """A kernel whose programs take tiles of rows; it multiplies, unless told otherwise."""
    options = {"warps": tile.warps, "stages": tile.stages, "dots": True, **more}
    constants = {**constants, "ROWS": tile.rows}
    return Kernel(
        name=f"{name}, {tile.rows} rows", function=function, constants=constants, **options
    )


# The cut of a branch as a device takes it, from the one that is assumed.
Adjust = Callable[[str, Any], Any]


def as_assumed(_branch: str, cut: Any) -> Any:
    """The cut of a device that nobody measured."""
    return cut


def selected(
    cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed
) -> Iterator[Kernel]:
    """The selected branch: lists of blocks, forward with the gated sum, gradients of keys."""
    from nsa.attention.triton import selected as launch
    from nsa.attention.triton.selected import queries, readers

    cut = adjust("selected", choose_selected_cut(cfg, seq_len, pairs))
    shape = launch.shape_constants(cfg)
    listed = launch.list_constants(cfg, cut)
    for name, fill in (("list", False), ("list (fill)", True)):
        constants = {**listed, "FILL": fill}
        yield Kernel(name=name, function=readers.list_kernel, constants=constants)
    pieces = {**shape, **launch.piece_constants(cut)}
    yield _tiled("dk, dv", readers.piece_kernel, cut.key_gradient, pieces)
    if cut.by_block:
        yield from _by_block(cfg, cut.by_block)
        return
    yield _tiled("forward", queries.forward_kernel, cut.forward, shape)


def _by_block(cfg: NSAConfig, cut: ByBlock) -> Iterator[Kernel]:
    """Instead of those that walk: blocks own the work, and parts are of the call's type."""
    from nsa.attention.triton import selected as launch
    from nsa.attention.triton.selected import queries, readers

    pointers = {name: kind for name, kind in _POINTERS.items() if name != "parts"}
    of: dict[str, Any] = {"pointers": pointers, "own": (*_OWN, "parts")}
    shape, places = launch.shape_constants(cfg), {"PLACES": cut.places}
    piece = {**shape, **launch.piece_constants(cut)}
    output = {name: shape[name] for name in ("HEADS", "D_V")}
    gradient = {name: shape[name] for name in ("HEADS", "D_K")}
    yield Kernel(
        name="places", function=readers.place_kernel,
        constants={"TOKENS": launch.TOKENS_OF_PLACES}, **of,
    )  # fmt: skip
    for name, function, tile, constants in (
        ("forward by block", queries.part_kernel, cut.forward, piece),
        ("merge", queries.merge_kernel, cut.merge, output | places),
        ("dq by block", queries.gradient_part_kernel, cut.query_gradient, piece),
        ("dq merge", queries.gradient_merge_kernel, cut.merge, gradient | places),
    ):
        yield _tiled(name, function, tile, constants, dots="by block" in name, **of)


def compressed(
    cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed
) -> Iterator[Kernel]:
    """The compressed branch: forward, gradients of keys, the choice of blocks."""
    from nsa.attention.triton import compressed as launch
    from nsa.attention.triton.compressed import rows

    cut = adjust("top", adjust("compressed", choose_compressed_cut(cfg, seq_len, pairs)))
    shape = launch.compressed_constants(cfg)
    owned = {**shape, "KEYS": cut.owned, "PIECE": cut.piece}
    exact = {**shape, "KEYS": cut.keys, "TERMS": launch.n_terms(torch.bfloat16)}
    out = _POINTERS | {"out": "fp32"}
    yield _tiled("compressed forward", rows.compressed_kernel, cut.forward, exact, pointers=out)
    own = launch.compressed_piece_kernel
    yield _tiled("compressed dk, dv", own, cut.key_gradient, owned)
    chosen = launch.top_constants(cfg, torch.bfloat16)
    yield Kernel(
        name=f"top blocks, {cut.top.rows} tokens", function=launch.top_kernel, warps=cut.top.warps,
        stages=cut.top.stages, dots=True,
        constants={**chosen, "TOKENS": cut.top.rows, "BLOCKS": cut.blocks},
    )  # fmt: skip


def window(
    cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed
) -> Iterator[Kernel]:
    """The gradients of the sliding window's keys, by whether walks are in pieces."""
    from nsa.attention.triton import window

    cut = adjust("window", choose_window_cut(cfg, seq_len, pairs))
    in_pieces = cut.pieces > 1
    pointers = _POINTERS | dict.fromkeys(("dk", "dv") if in_pieces else (), "fp32")
    yield _tiled(
        f"window dk, dv{', in pieces' * in_pieces}", window.window_keys_kernel, cut.key_gradient,
        window.constants(cfg, cut), pointers=pointers,
    )  # fmt: skip


def core(cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed) -> Iterator[Kernel]:
    """What serves several branches at once."""
    from nsa.attention.triton import core as launch

    cuts = launch.Cuts(
        compressed=adjust("compressed", choose_compressed_cut(cfg, seq_len, pairs)),
        selected=adjust("selected", choose_selected_cut(cfg, seq_len, pairs)),
        window=adjust("window", choose_window_cut(cfg, seq_len, pairs)),
    )
    of_window = dict.fromkeys(("parts_k", "parts_v"), "fp32" if cuts.window.pieces > 1 else "bf16")
    of: dict[str, Any] = {"pointers": _POINTERS | of_window}
    began = launch.first_constants(cfg, torch.bfloat16, cuts.window)
    yield _tiled("window forward, pool", launch.first_kernel, cuts.window.forward, began, **of)
    given = launch.queries_constants(cfg, cuts)
    yield _tiled("dq of all", launch.queries_kernel, cuts.queries, given, **of)
    yield Kernel(
        name="sums", function=launch.sums_kernel, constants=launch.sums_constants(cfg, cuts), **of
    )


PARTS: dict[str, Callable[[NSAConfig, int, int, Adjust], Iterator[Kernel]]] = {
    "compressed": compressed, "selected": selected, "window": window, "core": core,
}  # fmt: skip
