"""Public kernels of Native Sparse Attention by name: how each is called, and what it refuses.

The calls follow the sources of
flash-nsa: mdy666/Scalable-Flash-Native-Sparse-Attention, fcf117c3,
fla: fla-core 0.6.0, where fla-org/native-sparse-attention (bd67af59) went on,
fsa: Relaxed-System-Lab/Flash-Sparse-Attention, 1da34f35,
xunhao: XunhaoLai/native-sparse-attention-triton, 9bea856c,
liger: linkedin/Liger-Kernel, pull request 1288, 94bcc232; no release has this attention,
lucidrains: native-sparse-attention-pytorch 0.2.3, 83fa271c.

Each branch gets its own keys and values, as in `Branches`; the one module of lucidrains gets
those of the selected branch for all. The window, which most leave to FlashAttention, runs by the
copy of it that torch ships. A package is imported when its peer is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from nsa.attention.branches import Branches
from nsa.attention.selection import mean_pool
from nsa.config import FORCED_INITIAL_BLOCKS, FORCED_LOCAL_BLOCKS, NSAConfig

# What a peer raises that refuses a call or breaks: the others are measured all the same.
FAILURES: tuple[type[Exception], ...] = (
    *(RuntimeError, AssertionError, AttributeError, ImportError, TypeError, ValueError),
    *([resolve_name("triton.errors:TritonError")] if find_spec("triton") else []),
)
FORCED = FORCED_INITIAL_BLOCKS, FORCED_LOCAL_BLOCKS


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Somebody else's attention, called with what `nsa.attention.Branches` holds.

    run: gets the imported modules, then the eight tensors and cfg by name. heads: the query heads
    of a group that it takes; any where empty. own_cfg: the sizes that it computes with, for a cfg
    that is asked for. note: how what it computes differs.
    """

    run: Callable[..., Tensor]
    modules: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    own_cfg: Callable[[NSAConfig], NSAConfig] = lambda cfg: cfg
    note: str = ""

    def __call__(self, cfg: NSAConfig, **x: Tensor) -> Tensor:
        """The output [B,S,H,Dv]. Raises RuntimeError if not installed, or not for these heads."""
        if self.heads and cfg.heads_per_group not in self.heads:
            raise RuntimeError(f"takes only {', '.join(map(str, self.heads))} heads in a group")
        try:
            modules = [import_module(name) for name in self.modules]
        except ImportError as error:
            raise RuntimeError(f"not installed: {error}") from error
        return self.run(*modules, cfg=self.own_cfg(cfg), **Branches(**x).named())


def window(q: Tensor, k: Tensor, v: Tensor, w: int) -> Tensor:
    """The last w tokens, the current too: q [S,H,D] on k and v [S,G,D] to [S,H,D]."""
    if q.is_cuda:
        ends = _ends(q)
        sequence = (ends, ends, len(q), len(q))
        out: Tensor = varlen_attn(q, k, v, *sequence, window_size=(w - 1, 0), enable_gqa=True)
        return out
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    band = (back >= 0) & (back < w)
    return scaled_dot_product_attention(*heads, attn_mask=band, enable_gqa=True)[0].transpose(0, 1)


def _ends(q: Tensor) -> Tensor:
    """0 and S of one sequence [S,H,D]; made on the device, so that a CUDA graph can record it."""
    return torch.arange(2, dtype=torch.int32, device=q.device) * len(q)


def _gated(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
    """The sum of the branches [...,H,D], weighted by gates [...,H,3]."""
    return gates[..., 0:1] * cmp + gates[..., 1:2] * sel + gates[..., 2:3] * win


def _flash_nsa(nsa: Any, combine: Any, *, cfg: NSAConfig, **x: Tensor) -> Tensor:
    """Its block sizes are attributes of a class; it applies the sigmoid of the gates itself."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = (part[0] for part in x.values())
    nsa.NSAHelper.set_hyperparameters(cfg.l, cfg.d, cfg.l_sel, cfg.w, cfg.n_sel, *FORCED)
    if nsa.NSAHelper.x_maxlen != len(q):
        nsa.NSAHelper.init_cu_seqlens(_ends(q))
    scale, keys = cfg.d_k**-0.5, nsa.mean_pooling(k_cmp)
    cmp, lse = nsa.compress_attn(q, keys, nsa.mean_pooling(v_cmp), scale)
    blocks, _ = nsa.slc_topk_indices(q, keys, lse, scale, maybe_efficient_version=True)
    sel = nsa.select_attn(q, k_sel, v_sel, blocks, scale)
    win = window(q, k_win, v_win, cfg.w)
    out: Tensor = combine.fused_sigmoid_combine(cmp, sel, win, gates.logit())
    return out[None]


def _fla(nsa: Any, *, cfg: NSAConfig, **x: Tensor) -> Tensor:
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = x.values()
    scale, seq_len, keys = cfg.d_k**-0.5, q.shape[1], nsa.mean_pooling(k_cmp, cfg.l)
    values = nsa.mean_pooling(v_cmp, cfg.l)
    cmp, lse = nsa.parallel_nsa_compression(q, keys, values, seq_len, cfg.l, scale)
    blocks = nsa.parallel_nsa_topk(q, keys, seq_len, lse, cfg.n_sel, cfg.l, scale)
    picked = (blocks, cfg.n_sel, cfg.l_sel, scale, None)
    sel = nsa.ParallelNSAFunction.apply(q, k_sel, v_sel, *picked)
    return _gated(gates, cmp, sel, window(q[0], k_win[0], v_win[0], cfg.w)[None])


def _xunhao(ops: Any, selected: Any = None, *, cfg: NSAConfig, **x: Tensor) -> Tensor:
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = (part[0] for part in x.values())
    ends = _ends(q)
    keys, ends_of_keys = ops.avgpool_compress(k_cmp, None, ends, cfg.l, cfg.d)
    values, _ = ops.avgpool_compress(v_cmp, None, ends, cfg.l, cfg.d)
    sizes = (cfg.l, cfg.d, cfg.l_sel, cfg.n_sel, ends, ends_of_keys, len(q), len(keys))
    cmp, blocks = ops.compressed_attention(q, keys, values, *sizes, None, *FORCED)
    sel = (selected or ops.topk_sparse_attention)(q, k_sel, v_sel, blocks, cfg.l_sel, ends)
    return _gated(gates, cmp, sel, window(q, k_win, v_win, cfg.w))[None]


def _fsa(ops: Any, fsa: Any, *, cfg: NSAConfig, **x: Tensor) -> Tensor:
    """As its module does: above 8 heads in a group by its copy of xunhao's kernel."""
    own = fsa.FSA_topk_sparse_attention if cfg.heads_per_group <= 8 else None
    return _xunhao(ops, own, cfg=cfg, **x)


def _liger(
    nsa: Any, of_cmp: Any, of_sel: Any, of_win: Any, *, cfg: NSAConfig, **x: Tensor
) -> Tensor:
    """It has no pooling: ours makes the compressed keys and values."""
    x |= {name: mean_pool(x[name], cfg).to(x["q"].dtype) for name in ("k_cmp", "v_cmp")}
    q, keys, values, k_sel, v_sel, k_win, v_win, gates = (t.transpose(1, 2) for t in x.values())
    scale = cfg.d_k**-0.5
    cmp = of_cmp.nsa_compressed_attention(q, keys, values, cfg.l, cfg.d, scale)
    with torch.no_grad():
        p = nsa.compressed_scores(q, keys, scale, cfg.l, cfg.d)
        sizes = (cfg.n_kv_groups, cfg.l, cfg.d, cfg.l_sel, cfg.n_blocks(q.shape[2]))
        scores = nsa.selection_block_scores(p, *sizes)
        blocks = nsa.select_blocks(scores, cfg.l_sel, cfg.n_sel, *FORCED)
    sel = of_sel.nsa_selected_attention(q, k_sel, v_sel, blocks, cfg.l_sel, scale)
    win = of_win.nsa_sliding_attention(q, k_win, v_win, cfg.w, scale)
    return _gated(gates, cmp, sel, win).transpose(1, 2)


def _as_module(function: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    module.forward = function
    return module


@cache
def _without_projections(layer: Any, cfg: NSAConfig, triton: bool) -> Any:
    """A layer that takes q, k, v and the gates' logits side by side, and turns nothing."""
    gates = 3 * cfg.n_heads
    module = layer(
        dim=1, dim_head=cfg.d_k, heads=cfg.n_heads, kv_heads=cfg.n_kv_groups, causal=True,
        norm=False, sliding_window_size=cfg.w - 1, compress_block_size=cfg.l,
        compress_block_sliding_stride=cfg.d, selection_block_size=cfg.l_sel,
        num_selected_blocks=cfg.n_sel - 1, use_triton_kernel=triton,
        compress_mlp=_as_module(lambda x: x.mean(-2)),
        strategy_combine_mlp=_as_module(lambda x: x[..., -gates:]),
    )  # fmt: skip
    module.to_qkv, module.combine_heads = _as_module(lambda x: x[..., :-gates]), torch.nn.Identity()
    module.rotary_emb.rotate_queries_with_cached_keys = lambda q, k: (q, k)
    return module


def _lucidrains(package: Any, *, cfg: NSAConfig, **x: Tensor) -> Tensor:
    parts = (x["q"], x["k_sel"], x["v_sel"], x["gates"].logit())
    module = _without_projections(package.SparseAttention, cfg, parts[0].is_cuda).to(parts[0])
    out: Tensor = module(torch.cat([part.flatten(2) for part in parts], -1))
    return out.view(parts[0].shape)


PEERS = {
    "flash-nsa": Peer(run=_flash_nsa, modules=("flash_nsa", "flash_nsa.ops.combine")),
    "fla": Peer(
        run=_fla,
        modules=("fla.ops.nsa.parallel",),
        heads=(16, 32, 64, 128),
        own_cfg=lambda cfg: replace(cfg, l=cfg.l_sel, d=cfg.l_sel),
        note="compresses whole blocks of l_sel",
    ),
    "fsa": Peer(
        run=_fsa,
        modules=("nsa_ref.ops", "fsa.ops"),
        note="compares scores in bfloat16; above 8 heads in a group by its copy of xunhao",
    ),
    "xunhao": Peer(run=_xunhao, modules=("native_sparse_attention.ops",)),
    "liger": Peer(
        run=_liger,
        modules=(
            "liger_kernel.transformers.native_sparse_attention",
            *(
                f"liger_kernel.ops.nsa_{kind}_attention"
                for kind in ("compressed", "selected", "sliding")
            ),
        ),
        note="scores a block by compressed keys of the next one too",
    ),
    "lucidrains": Peer(
        run=_lucidrains,
        modules=("native_sparse_attention_pytorch",),
        heads=(1, 2, 4, 8, 16),
        note="one key for all branches, an empty compressed key, other blocks",
    ),
}


def find_peer(text: str) -> Peer:
    """The peer of a name, or of "module:callable". Raises SystemExit where there is none."""
    if text in PEERS:
        return PEERS[text]
    try:
        run = resolve_name(text)
        problem = "" if callable(run) else f"{type(run).__name__} is not callable"
    except (ImportError, AttributeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise SystemExit(f"--peers {text}: {problem}; give {', '.join(PEERS)} or module:callable")
    return Peer(run=run)
