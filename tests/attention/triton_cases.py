"""What the Triton kernels compute, held against float64: whole attention, cut as a case says.

The truth is torch's in float64, with all masks written out, and for the choice of blocks NumPy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.attention.selection import block_bits, ranges_v1
from nsa.attention.triton import ByBlock, CompressedCut, SelectedCut, Tile, WindowCut
from nsa.config import NSAConfig, Phi
from nsa.witness import oracle
from nsa.witness.equations import judge
from nsa.witness.oracle import BRANCHES
from tests.attention.triton_kernels import LAUNCH, compare, cut_as, poisoned, written_once
from tests.factory.tables import rows

HALF = torch.float16
BOUND = {torch.float32: 1e-5, HALF: 5 * 2.0**-11}
# Where the last block taken and the first one left out are nearer, rounding may choose.
TIE = 1e-5
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, and how its work is cut: as a device would where rows is 0.

    rows to pieces are of tiles' cuts; readers: a piece of the selected branch; run: positions that
    blocks own at a time, with 0 queries walk. drawn: what is read is drawn, not chosen, and token 3
    reads nothing. sharp: how large compressed keys are.
    """

    seq_len: int
    heads: int = 1
    groups: int = 1
    batch: int = 1
    d_k: int = 16
    d_v: int = 16
    dtype: torch.dtype = torch.float32
    l: int = 8  # noqa: E741 - the paper's letter
    d: int = 4
    l_sel: int = 8
    n_sel: int = 4
    w: int = 16
    phi: Phi = "avg"
    rows: int = 0
    keys: int = 16
    owned: int = 16
    piece: int = 24
    tokens: int = 32
    blocks: int = 16
    pieces: int = 1
    readers: int = 16
    run: int = 0
    drawn: bool = False
    sharp: float = 1.0

    def config(self) -> NSAConfig:
        """The package's config for it."""
        return NSAConfig(
            dim=8, n_heads=self.heads * self.groups, n_kv_groups=self.groups, d_k=self.d_k,
            d_v=self.d_v, l=self.l, d=self.d, l_sel=self.l_sel, n_sel=self.n_sel, w=self.w,
            phi=self.phi,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """By NAMES, q [B,S,G,h,Dk] first, and a gradient; not contiguous.

        Keys and values that are compressed already are of float32. Some gates are 0, as sigmoid
        may round.
        """
        draw = torch.Generator().manual_seed(self.seq_len)
        h, g, s = self.heads * self.groups, self.groups, self.seq_len
        n, kind = (s, self.dtype)
        if self.phi == "mlp":
            n, kind = self.config().n_compressed(s), torch.float32
        of_keys = [(s, g, self.d_k), (s, g, self.d_v)] * 2
        shapes = [(s, g, self.heads, self.d_k), (n, g, self.d_k), (n, g, self.d_v), *of_keys]
        shapes += [(s, h, 3), (s, h, self.d_v)]
        made = [
            torch.randn(self.batch, *shape[:-1], shape[-1] + 3, generator=draw)[..., 1:-2]
            for shape in shapes
        ]
        made[0] = 1.5 * made[0]
        made[7] = made[7].sigmoid()
        made[7][:, 2::5, :, s % 3] = 0.0
        x = [one.to(self.dtype) for one in made]
        x[1:3] = [self.sharp * made[1].to(kind), made[2].to(kind)]
        return x

    def cuts(self) -> dict[str, Any]:
        """By branch, where it is not for the device to say."""
        cfg, s = self.config(), self.seq_len
        n_blocks, places = cfg.n_blocks(s), min(self.n_sel, cfg.n_blocks(s))
        tile = Tile(rows=self.rows or 64, warps=1, stages=1)
        alike = {"forward": tile, "query_gradient": tile}
        by_block = ByBlock(
            **alike, merge=tile, tokens=self.run, places=places, piece=self.readers,
            n_blocks=n_blocks,
        )  # fmt: skip
        cut = SelectedCut(
            **alike, key_gradient=tile, piece=self.readers, n_blocks=n_blocks, readers=s * places,
            by_block=by_block if self.run else None,
        )  # fmt: skip
        if not self.rows:
            return {"selected": cut} if self.run else {}
        compressed = CompressedCut(
            forward=tile, key_gradient=tile, top=Tile(rows=self.tokens, warps=1, stages=1),
            keys=self.keys, rounded_keys=self.keys, owned=self.owned, piece=self.piece,
            blocks=self.blocks,
        )  # fmt: skip
        window = WindowCut(**alike, key_gradient=tile, keys=self.keys, pieces=self.pieces)
        return {"selected": cut, "compressed": compressed, "top": compressed, "window": window}


def cases(name: str) -> tuple[Case, ...]:
    """Those of a table, in which types have torch's names."""
    kinds = {"float32": torch.float32, "float16": HALF}
    return tuple(
        Case(**one | {"dtype": kinds[one.get("dtype", "float32")]}) for one in rows(__file__, name)
    )


KERNELS = ("compressed", "pool", "selected", "selected_by_block", "window", "all")
# Of each kernel the shapes that it may get wrong.
CASES = {kernel: cases(kernel) for kernel in KERNELS}
TUNED = cases("tuned")


def branch(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and log-sum-exp to the base 2 [B,G,S,h], with the mask written out.

    seen: what fits [B,G,S,h,T]. Where nothing is seen the output is 0.
    """
    scores = torch.einsum("bsghd,btgd->bgsht", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("bgsht,btgd->bsghd", torch.nan_to_num(scores.softmax(-1)), v)
    return out.flatten(2, 3), scores.detach().logsumexp(-1) * np.log2(np.e)


def pooled(x: Tensor, case: Case) -> Tensor:
    """Compressed keys or values [B,N,G,D]: as given, or means of the blocks that end within x."""
    if case.phi == "mlp":
        return x
    begins = range(0, x.shape[1] - case.l + 1, case.d)
    return torch.stack([x[:, i : i + case.l].mean(1) for i in begins], 1) if begins else x[:, :0]


def ended(n_keys: int, case: Case) -> Tensor:
    """Which compressed keys a token sees: [S,1,N]."""
    ends = torch.arange(n_keys) * case.d + case.l - 1
    return (ends <= torch.arange(case.seq_len)[:, None])[:, None]


def right(case: Case, tensors: list[Tensor], blocks: Tensor) -> dict[str, Tensor]:
    """Output, gradients, and sums: of rounded keys, and exact ones of those that choose."""
    leaves = [x.double().requires_grad_() for x in tensors[:-1]]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = leaves
    k_cmp, v_cmp = pooled(k_cmp, case), pooled(v_cmp, case)
    token = torch.arange(case.seq_len)
    past = token <= token[:, None]
    reads = (blocks[..., None] == token // case.l_sel).any(-2).transpose(1, 2)
    near = past & (token > token[:, None] - case.w)
    visible = ended(k_cmp.shape[1], case)
    branches = ((k_cmp, v_cmp, visible), (k_sel, v_sel, (reads & past)[:, :, :, None]),
                (k_win, v_win, near[:, None]))  # fmt: skip
    outs, sums = zip(*(branch(q, *one) for one in branches), strict=True)
    rounded = branch(q, k_cmp.to(case.dtype).double(), v_cmp, visible)[1]
    total = (torch.stack(outs, -2) * gates[..., None]).sum(-2)
    grads = torch.autograd.grad(total, leaves, tensors[-1].double(), materialize_grads=True)
    named = {f"d {name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    lse = {f"lse {name}": one for name, one in zip(BRANCHES, (rounded, *sums[1:]), strict=True)}
    return {"out": total.detach(), **named, **lse, "lse exact": sums[0]}


def found_by(launch: ModuleType, case: Case, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The same by the kernels; with the blocks, and the bits that stand for them."""
    cfg, (*given, grad) = case.config(), tensors
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = given
    with cut_as(launch, **case.cuts()):
        win, win_lse, terms, values = launch.window_and_terms(q, k_win, v_win, k_cmp, v_cmp, cfg)
        cmp, cmp_lse, exact = launch.compressed.attend(q, terms, values, cfg)
        blocks, bits = launch.compressed.top_blocks(q, terms, exact, cfg)
        if case.drawn:
            blocks = drawn(case)
            bits = block_bits(ranges_v1(blocks, cfg), cfg)
        mixed = launch.selected.forward_mixed(q, k_sel, v_sel, bits, cmp, win, gates, cfg)
        out, sel, sel_lse = mixed
        kept = (bits, terms, values, cmp, cmp_lse, win, win_lse, sel, sel_lse)
        grads = launch.backward(grad, given, kept, cfg)
    shape = (case.batch, case.groups, case.seq_len, case.heads)
    sums = (cmp_lse, sel_lse, win_lse, exact)
    lse = {f"lse {n}": x.view(shape) for n, x in zip((*BRANCHES, "exact"), sums, strict=True)}
    named = {f"d {name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    return {"out": out, **named, **lse, "blocks": blocks, "bits": bits}


def drawn(case: Case) -> Tensor:
    """Blocks [B,S,G,n] by the rules, the free ones at random; token 3 reads nothing at all."""
    rng = np.random.default_rng(case.seq_len)
    shape = (case.batch, case.seq_len, case.groups, case.n_sel)
    blocks = np.full(shape, -1, dtype=np.int64)
    for b, t, g in np.ndindex(*shape[:3]):
        current = t // case.l_sel
        taken = {0, current, max(0, current - 1)}
        free = [j for j in range(current + 1) if j not in taken]
        room = min(case.n_sel - len(taken), len(free))
        taken |= set(rng.choice(free, room, replace=False).tolist()) if room > 0 else set()
        blocks[b, t, g, : len(taken)] = sorted(taken)
    blocks[:, 3] = -1
    return torch.from_numpy(blocks)


def in_order(blocks: Tensor) -> Tensor:
    """Ascending, then -1."""
    none = torch.iinfo(blocks.dtype).max
    found = blocks.where(blocks >= 0, none).sort(-1)[0]
    return found.where(found < none, -1)


def wrong_blocks(case: Case, found: dict[str, Tensor], tensors: list[Tensor]) -> list[str]:
    """Tokens whose blocks are not those of the equations, near ties aside; and bits of others."""
    blocks, bits = found["blocks"], found["bits"]
    number = torch.arange(case.config().n_blocks(case.seq_len))
    told = ((bits[:, number // 32] >> (number % 32)[:, None]) & 1).bool()
    wanted = (blocks[..., None] == number).any(-2).permute(0, 2, 3, 1).flatten(0, 1)
    wrong = [] if torch.equal(told, wanted) else [f"bits of other blocks in {case}"]
    if case.drawn:
        return wrong
    q, k = tensors[0].double(), pooled(tensors[1].double(), case)
    visible = ended(k.shape[1], case)[None].numpy()
    p, _ = oracle.attend(q.numpy(), k.numpy(), np.zeros((*k.shape[:3], 1)), visible)
    scores = torch.from_numpy(oracle.block_scores(case.config(), p, len(number)))
    at = torch.arange(case.seq_len)[:, None]
    illegal, _, gaps = judge(blocks, scores, at, case.config())
    if illegal or bool((gaps > TIE).any()) or not torch.equal(blocks, in_order(blocks)):
        wrong.append(f"blocks of {case}: {illegal} illegal, {float(gaps.max())} left out")
    return wrong


def core(launch: ModuleType = LAUNCH, cases: tuple[Case, ...] = CASES["all"]) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    problems: list[str] = []
    for case in cases:
        tensors = case.tensors()
        with written_once(problems), poisoned():
            found = found_by(launch, case, tensors)
        problems += wrong_blocks(case, found, tensors)
        for name, truth in right(case, tensors, found["blocks"]).items():
            # A gradient that is 0 everywhere, as a softmax over one key has it, is held against 1.
            base = float(truth.numel() > 0 and truth.abs().max() < 1e-12)
            # One sum chooses blocks, the other is of keys as they were rounded.
            exact = name in ("lse cmp", "lse exact")
            bound = BOUND[torch.float32 if exact else case.dtype]
            problems += compare(
                f"{name} of {case}", found[name].double() + base, truth + base, bound
            )
        if problems:
            break
    return problems


def ties(launch: ModuleType = LAUNCH) -> list[str]:
    """Keys that are all the same: every block scores the same, and the first ones are taken.

    Two runs of blocks: those that the second one has to take in cost the last ones of the first.
    """
    case = Case(seq_len=64, heads=3, phi="mlp", l=4, d=2, l_sel=4, rows=64, tokens=64, blocks=8)
    tensors = case.tensors()
    tensors[1] = torch.ones_like(tensors[1])
    found = found_by(launch, case, tensors)
    taken = {tuple(found["blocks"][0, t, 0].tolist()) for t in range(60, 64)}
    problems = [] if taken == {(0, 1, 14, 15)} else [f"not the first ones: {taken}"]
    # And by the equations, which call exact ties no tie.
    return problems + wrong_blocks(case, found, tensors)
