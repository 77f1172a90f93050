"""Every Triton kernel as a call of a given shape launches it: function, constants, options.

Each part of attention is a function of the config, the length and the pairs = batch x kv groups;
`compiled` compiles what it gives. None is called before triton is known to be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa.attention.triton.selected.tiles import ByBlock, choose_cut
from nsa.attention.triton.tiles import LEAST, Tile, choose_compressed_cut, choose_window_cut
from nsa.config import NSAConfig

# Arguments that point to numbers of the call's own type.
_TENSORS = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel as it is compiled: its function, its constants, its options.

    pointers: Triton's type of each argument that points to something else than the call's type.
    own: further arguments that point to numbers of the call's type.
    dots: it multiplies on tensor cores.
    """

    name: str
    function: Any
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    dots: bool = False
    pointers: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()

    def type_of(self, argument: str, dtype: str) -> str:
        """Triton's word for the type of an argument, in a call of type `dtype`."""
        if argument in self.constants:
            return "constexpr"
        if argument in self.pointers:
            return f"*{self.pointers[argument]}"
        if argument in (*_TENSORS, *self.own):
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


_LISTS = {
    "blocks": "i64", "ranges": "i64", "bits": "i32", "lse": "fp32", "delta": "fp32",
    "parts": "fp32", "counts": "i32", "offsets": "i32", "readers": "i32", "piece_ends": "i32",
    "before": "i8", "read": "i32", "sums": "fp32",
}  # fmt: skip


def selected(
    cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed
) -> Iterator[Kernel]:
    """The selected branch: lists of blocks, forward, gradients of queries and of keys."""
    from nsa.attention.triton.selected import launch, readers, rows

    cut = adjust("selected", choose_cut(cfg, seq_len, pairs))
    shape = launch.shape_constants(cfg)
    by_block, of = cut.by_block, {"pointers": _LISTS}
    packed = {"L_SEL": cfg.l_sel, "N_SEL": cfg.n_sel, "TOKENS": launch.TOKENS}
    listed = launch.list_constants(cfg, cut)
    total = {name: value for name, value in shape.items() if name != "HEADS"} | {"FEW": LEAST}
    for name, function, constants, stages in (
        ("pack", readers.pack_kernel, packed, 1),
        ("list", readers.list_kernel, {**listed, "FILL": False}, 3),
        ("list (fill)", readers.list_kernel, {**listed, "FILL": True}, 3),
        ("sum", readers.sum_kernel, total, 3),
    ):
        yield Kernel(name=name, function=function, constants=constants, stages=stages, **of)
    # Other shapes walk where this one does not.
    walk, every = {**shape, "EVERY": cut.every}, " of every block" * cut.every
    pieces = {**shape, **launch.piece_constants(cut)}
    alone = {**walk, **dict.fromkeys(("cmp", "win", "gates", "mixed")), "MIXED": False}
    yield _tiled(f"forward{every}", rows.forward_kernel, cut.forward, alone, **of)
    yield _tiled(f"dq{every}", rows.query_gradient_kernel, cut.query_gradient, walk, **of)
    yield _tiled("dk, dv", readers.piece_kernel, cut.key_gradient, pieces, **of)
    if by_block:
        yield from _by_block(cfg, by_block)


def _by_block(cfg: NSAConfig, cut: ByBlock) -> Iterator[Kernel]:
    """Instead of the two that walk: blocks own the work, and parts are of the call's type."""
    from nsa.attention.triton.selected import blocks, launch, readers

    pointers = {name: kind for name, kind in _LISTS.items() if name != "parts"}
    shape, places = launch.shape_constants(cfg), {"PLACES": cut.places}
    piece = {**shape, **launch.piece_constants(cut)}
    output = {name: shape[name] for name in ("HEADS", "D_V")}
    gradient = {name: shape[name] for name in ("HEADS", "D_K")}
    yield Kernel(
        name="places", function=readers.place_kernel, pointers=pointers,
        constants={"TOKENS": launch.TOKENS_OF_PLACES},
    )  # fmt: skip
    for name, function, tile, constants in (
        ("forward by block", blocks.part_kernel, cut.forward, piece),
        ("merge", blocks.merge_kernel, cut.merge, output | places),
        ("delta", blocks.delta_kernel, cut.merge, output | gradient),
        ("dq by block", blocks.gradient_part_kernel, cut.query_gradient, piece),
        ("dq merge", blocks.gradient_merge_kernel, cut.merge, gradient | places),
    ):
        dots = "by block" in name
        yield _tiled(name, function, tile, constants, dots=dots, pointers=pointers, own=("parts",))


def compressed(
    cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed
) -> Iterator[Kernel]:
    """The compressed branch: forward, gradients of queries and of keys, the choice of blocks.

    What it gives and its gradients are float32 in every call, and its keys where they choose.
    """
    from nsa.attention.triton import between
    from nsa.attention.triton.compressed import launch, rows, top

    floats = ("out", "grad", "lse", "exact_lse", "delta", "parts")
    own = ("terms", "rounded_grad")
    of: dict[str, Any] = {
        "pointers": {**dict.fromkeys(floats, "fp32"), "blocks": "i64", "bits": "i32"}
    }
    of["own"] = own
    cut = adjust("top", adjust("compressed", choose_compressed_cut(cfg, seq_len, pairs)))
    shape, terms = (
        launch.compressed_constants(cfg),
        launch.n_terms(torch.bfloat16),
    )
    owned = {"KEYS": cut.owned, "PIECE": cut.piece}
    exact, rounded = {"KEYS": cut.keys, "TERMS": terms}, {"KEYS": cut.rounded_keys}
    for name, function, tile, more in (
        ("forward", rows.compressed_kernel, cut.forward, exact),
        ("dq", rows.compressed_query_gradient_kernel, cut.query_gradient, rounded),
        ("dk, dv", launch.compressed_piece_kernel, cut.key_gradient, owned),
    ):
        yield _tiled(f"compressed {name}", function, tile, {**shape, **more}, **of)
    yield Kernel(
        name="compressed sum", function=between.compressed_sum_kernel, pointers={"parts": "fp32"},
        constants=launch.sum_constants(cfg, cut),
    )  # fmt: skip
    yield Kernel(
        name="pool", function=between.pool_kernel, own=(*own, "values"),
        constants=launch.pool_constants(cfg, torch.bfloat16),
    )  # fmt: skip
    chosen = launch.top_constants(cfg, torch.bfloat16)
    yield Kernel(
        name=f"top blocks, {cut.top.rows} tokens", function=top.top_kernel, warps=cut.top.warps,
        stages=cut.top.stages, dots=True,
        constants={**chosen, "TOKENS": cut.top.rows, "BLOCKS": cut.blocks}, **of,
    )  # fmt: skip


def window(
    cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed
) -> Iterator[Kernel]:
    """The sliding window: forward, gradients; of keys by whether walks are in pieces."""
    from nsa.attention.triton import window

    cut = adjust("window", choose_window_cut(cfg, seq_len, pairs))
    shape, in_pieces = window.constants(cfg, cut), cut.pieces > 1
    parts = dict.fromkeys(("dk", "dv") if in_pieces else (), "fp32")
    of_keys = f"window dk, dv{', in pieces' * in_pieces}"
    for name, function, tile, more in (
        ("window forward", window.window_kernel, cut.forward, {}),
        ("window dq", window.window_query_kernel, cut.query_gradient, {}),
        (of_keys, window.window_keys_kernel, cut.key_gradient, parts),
    ):
        pointers = {"lse": "fp32", "delta": "fp32", **more}
        yield _tiled(name, function, tile, shape, pointers=pointers)
    if in_pieces:
        yield Kernel(
            name="window sum", function=window.window_sum_kernel,
            pointers={"parts_k": "fp32", "parts_v": "fp32"},
            constants={"PIECES": cut.pieces, "NUMBERS": window.NUMBERS},
        )  # fmt: skip


def between(
    cfg: NSAConfig,
    seq_len: int,  # noqa: ARG001
    pairs: int,  # noqa: ARG001
    adjust: Adjust = as_assumed,  # noqa: ARG001
) -> Iterator[Kernel]:
    """The gated sum and its gradients; of no length."""
    from nsa.attention.triton import between

    mixed = between.mix_constants(cfg.n_heads, cfg.d_v)
    for name, function in (
        ("mix", between.mix_kernel),
        ("mix backward", between.mix_backward_kernel),
    ):
        yield Kernel(
            name=name, function=function, constants=mixed,
            # The compressed branch is float32 in every call.
            pointers={"cmp": "fp32", "d_cmp": "fp32"},
            own=("sel", "win", "gates", "d_sel", "d_win", "d_gates"),
        )  # fmt: skip


def core(cfg: NSAConfig, seq_len: int, pairs: int, adjust: Adjust = as_assumed) -> Iterator[Kernel]:
    """What serves several branches at once; the kernels of `selected` where blocks own the work."""
    from nsa.attention.triton.core import first, launch, queries, sums
    from nsa.attention.triton.selected import launch as by_selection
    from nsa.attention.triton.selected import rows

    cuts = launch.Cuts(
        compressed=adjust("compressed", choose_compressed_cut(cfg, seq_len, pairs)),
        selected=adjust("selected", choose_cut(cfg, seq_len, pairs)),
        window=adjust("window", choose_window_cut(cfg, seq_len, pairs)),
    )
    lists = {name: _LISTS[name] for name in ("bits", "lse", "sums", "delta", "piece_ends")}
    floats = dict.fromkeys(
        ("cmp", "cmp_lse", "sel_lse", "win_lse", "selected_parts", "compressed_parts"), "fp32"
    )
    of_window = dict.fromkeys(("parts_k", "parts_v"), "fp32" if cuts.window.pieces > 1 else "bf16")
    of: dict[str, Any] = {"pointers": {**lists, **floats, **of_window}}
    of["own"] = (
        "k_win", "v_win", "k_cmp", "v_cmp", "k_sel", "v_sel", "win", "sel", "terms", "values",
        "gates", "mixed", "d_gates", "dk_sel", "dv_sel", "dk_cmp", "dv_cmp", "dk_win", "dv_win",
        "dq_parts",
    )  # fmt: skip
    began = launch.first_constants(cfg, torch.bfloat16, cuts.window)
    yield _tiled("window forward, pool", first.first_kernel, cuts.window.forward, began, **of)
    if not cuts.selected.by_block:
        walk = {**by_selection.shape_constants(cfg), "EVERY": cuts.selected.every, "MIXED": True}
        forward = by_selection.mixing_tile(cuts.selected)
        yield _tiled("selected forward, mix", rows.forward_kernel, forward, walk, **of)
    given = launch.queries_constants(cfg, cuts)
    yield _tiled("dq of all", queries.queries_kernel, cuts.queries, given, **of)
    yield Kernel(
        name="sums", function=sums.sums_kernel, constants=launch.sums_constants(cfg, cuts), **of
    )


PARTS: dict[str, Callable[[NSAConfig, int, int, Adjust], Iterator[Kernel]]] = {
    "between": between, "compressed": compressed, "selected": selected, "window": window,
    "core": core,
}  # fmt: skip
