"""Properties that Native Sparse Attention has by its definition, on every path.

Letters as in the project's list of proofs; (g) and (h) are also part of the NumPy comparison.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa.attention import attend, branches, nsa_attention
from nsa.attention.branches import Branches
from nsa.attention.cpu import batched_cpu
from nsa.attention.cpu import blocks as cpu_blocks
from nsa.attention.cpu import dense as cpu_pieces
from nsa.attention.selection import block_scores, overlap_weights
from nsa.config import Way
from nsa.projection import rotate_into, rotations

PATHS = ("reference", "sequential", "batched", "sdpa")
SMALL = nsa.NSAConfig(
    dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=4, w=10
)
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


def inputs(
    cfg: nsa.NSAConfig,
    seq_len: int,
    *,
    batch: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    groups = cfg.n_kv_groups
    x = {"q": normal(batch, seq_len, cfg.n_heads, cfg.d_k)}
    for branch in ("cmp", "sel", "win"):
        x[f"k_{branch}"] = normal(batch, seq_len, groups, cfg.d_k)
        x[f"v_{branch}"] = normal(batch, seq_len, groups, cfg.d_v)
    x["gates"] = normal(batch, seq_len, cfg.n_heads, 3).sigmoid()
    return {name: value.requires_grad_() for name, value in x.items()}


def run(x: dict[str, Tensor], cfg: nsa.NSAConfig, path: str, version: str = "v2") -> Tensor:
    if path == "sdpa":
        return attend(Branches(**x), cfg, Way(selection_ranges=version, force_sdpa=True))[0]
    return nsa_attention(**x, cfg=cfg, way=Way(path=path, selection_ranges=version))


def only(x: dict[str, Tensor], branch: int) -> dict[str, Tensor]:
    """The same inputs with one gate open."""
    gates = torch.zeros_like(x["gates"])
    gates[..., branch] = 1.0
    return {**x, "gates": gates.requires_grad_()}


def dense(x: dict[str, Tensor], branch: str, cfg: nsa.NSAConfig) -> Tensor:
    """Dense causal attention with a branch's keys and values, written out.

    By no kernel, so that it is the same whichever kernels SDPA may take.
    """
    q = x["q"].transpose(1, 2)
    k, v = (
        x[f"{kind}_{branch}"].repeat_interleave(cfg.heads_per_group, 2).transpose(1, 2)
        for kind in "kv"
    )
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("only_one", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_the_dense_truth_is_computed_by_no_kernel(only_one: SDPBackend) -> None:
    """Neither takes float64: what is held against one of them must not need it."""
    x = inputs(SMALL, 9)
    with sdpa_kernel([only_one]):
        found = dense(x, "win", SMALL)
    assert gap(found[:, 0], x["v_win"][:, 0].repeat_interleave(SMALL.heads_per_group, 1)) <= 1e-12


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def layer(phi: str, path: str) -> nsa.NSAAttention:
    torch.manual_seed(0)
    cfg = nsa.NSAConfig(
        dim=16, n_heads=4, n_kv_groups=2, d_k=6, d_v=4, l=6, d=3, l_sel=6, n_sel=3, w=7, phi=phi
    )
    way = Way(force_sdpa=True) if path == "sdpa" else Way(path=path)
    return nsa.NSAAttention(cfg, way).double()


# (a)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_a_every_parameter_gets_a_gradient(phi: str, path: str) -> None:
    module = layer(phi, path)
    x = torch.randn(2, 41, 16, dtype=torch.float64)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        # One product serves all branches, so every single row must be reached.
        rows = parameter.grad.reshape(parameter.shape[0], -1)
        assert bool((rows.abs().sum(1) > 0).all()), f"{name} has rows without a gradient"


# (b)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("cut", [1, 5, 6, 20, 40])
def test_b_the_future_changes_nothing(phi: str, path: str, cut: int) -> None:
    module = layer(phi, path)
    x = torch.randn(2, 41, 16, dtype=torch.float64)
    y, blocks = module(x), module.last_blocks
    other = x.clone()
    other[:, cut:] = 10 * torch.randn(2, 41 - cut, 16, dtype=torch.float64)
    changed, others = module(other), module.last_blocks
    assert torch.equal(blocks[:, :cut], others[:, :cut])
    assert gap(y[:, :cut], changed[:, :cut]) <= 1e-12
    assert gap(y[:, cut:], changed[:, cut:]) > 1e-3, "the change must be visible after the cut"


@pytest.mark.parametrize("path", PATHS)
def test_b_the_future_is_bit_identical_in_the_core(path: str) -> None:
    """No product changes its row count here, so not one bit may move."""
    x = inputs(SMALL, 77)
    other = {n: v.detach().clone() for n, v in x.items()}
    for value in other.values():
        value[:, 50:] = 1e6
    assert torch.equal(run(x, SMALL, path)[:, :50], run(other, SMALL, path)[:, :50])


# (c)
def test_c_products_depend_on_the_difference_of_positions() -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turns = rotations(torch.arange(4096), 8, 10_000.0, torch.float64)

    def turned(v: Tensor) -> Tensor:
        source = v.expand(1, 1, 4096, 8).contiguous()
        target = torch.empty_like(source)
        rotate_into(source, turns, target)
        return target[0, 0]

    q_at, k_at = turned(q), turned(k)
    for distance in (0, 1, 7, 100):
        products = [float(q_at[t] @ k_at[t - distance]) for t in (distance, 1000, 4095)]
        assert max(products) - min(products) <= 1e-12
    assert abs(float(q_at[9] @ k_at[0]) - float(q_at[9] @ k_at[5])) > 1e-3


@pytest.mark.parametrize("width", [2, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_c_turning_works_in_any_layout(width: int, dtype: torch.dtype) -> None:
    """Odd strides take another way through the code than even ones."""
    turns = rotations(torch.arange(5), width, 100.0, dtype)
    source = torch.randn(1, 5, 3, width + 1).to(dtype)[..., 1:].transpose(1, 2)
    target = torch.empty_like(source.contiguous())
    rotate_into(source, turns, target)
    angle = torch.arange(5.0)[:, None] * 100.0 ** (-torch.arange(0.0, width, 2) / width)
    a, b = source[..., 0::2].float(), source[..., 1::2].float()
    real, imaginary = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert gap(target[..., 0::2].float(), real) <= bound
    assert gap(target[..., 1::2].float(), imaginary) <= bound


# (d)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seq_len", [1, 31, 32])
def test_d_selecting_everything_is_dense(path: str, seq_len: int) -> None:
    x = only(inputs(SMALL, seq_len), 1)
    assert SMALL.n_sel * SMALL.l_sel >= seq_len
    assert gap(run(x, SMALL, path), dense(x, "sel", SMALL)) <= 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_d_a_window_over_everything_is_dense(path: str) -> None:
    cfg = nsa.NSAConfig(**{**vars(SMALL), "w": 77})
    x = only(inputs(cfg, 77), 2)
    assert gap(run(x, cfg, path), dense(x, "win", cfg)) <= 1e-12
    narrow = nsa.NSAConfig(**{**vars(SMALL), "w": 76})
    assert gap(run(x, narrow, path)[:, -1], dense(x, "win", cfg)[:, -1]) > 1e-6


# (e)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_e_each_branch_depends_on_its_keys(path: str, branch: str) -> None:
    place = ("cmp", "sel", "win").index(branch)
    x = only(inputs(SMALL, 40), place)
    grads = torch.autograd.grad(
        run(x, SMALL, path)[:, 20:].sum(), list(x.values()), materialize_grads=True
    )
    used = {name for name, grad in zip(x, grads, strict=True) if bool((grad != 0).any())}
    # The closed gates too have gradients, <grad, branch output>, whatever their value.
    assert used == {"q", f"k_{branch}", f"v_{branch}", "gates"}


# (f)
@pytest.mark.parametrize("path", PATHS)
def test_f_blocks_of_one_token_collapse_to_dense(path: str) -> None:
    cfg = nsa.NSAConfig(**{**vars(SMALL), "l": 1, "d": 1, "l_sel": 1, "n_sel": 30, "w": 30})
    x = inputs(cfg, 30)
    for place, branch in enumerate(("cmp", "sel", "win")):
        alone = only(x, place)
        assert gap(run(alone, cfg, path), dense(alone, branch, cfg)) <= 1e-12


# (g)
def test_g_overlap_weights() -> None:
    assert overlap_weights(nsa.NSAConfig()) == [(-1, 1), (0, 2), (1, 2), (2, 2), (3, 1)]
    p = torch.zeros(12, dtype=torch.float64)
    p[4] = 1.0  # compressed block 4 covers tokens 64..95, all inside selection block 1
    assert block_scores(p, 3, nsa.NSAConfig()).tolist() == [0.0, 2.0, 0.0]
    p = torch.zeros(12, dtype=torch.float64)
    p[3] = 1.0  # tokens 48..79: half in block 0, half in block 1
    assert block_scores(p, 3, nsa.NSAConfig()).tolist() == [1.0, 1.0, 0.0]


# (h)
@pytest.mark.parametrize("n_sel", [3, 4, 9])
def test_h_forced_blocks_are_inside_n(n_sel: int) -> None:
    cfg = nsa.NSAConfig(**{**vars(SMALL), "n_sel": n_sel})
    x = inputs(cfg, 131, batch=2)
    blocks = attend(Branches(**x), cfg, Way(path="reference"))[1]
    assert blocks.shape == (2, 131, 2, n_sel)
    for t in range(131):
        current = t // cfg.l_sel
        for row in blocks[:, t].flatten(0, 1).tolist():
            chosen = [j for j in row if j >= 0]
            assert row == chosen + [-1] * (n_sel - len(chosen)), "padding comes last"
            assert chosen == sorted(set(chosen))
            assert {0, max(0, current - 1), current} <= set(chosen)
            assert max(chosen) == current and len(chosen) == min(n_sel, current + 1)


def test_h_ties_go_to_the_lower_index() -> None:
    """Equal keys make equal probabilities: block 0 has fewer overlaps, the others tie."""
    x = inputs(SMALL, 130)
    with torch.no_grad():
        x["k_cmp"].fill_(0.3)
    for t in (64, 100, 129):
        current = t // SMALL.l_sel
        expected = [0, 1, current - 1, current]
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            way = Way(path="reference")
            got = attend(Branches(**x).to(dtype), SMALL, way)[1][0, t]
            assert got.tolist() == [expected, expected], (t, dtype)


# (i)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seq_len", [2, 8])
def test_i_gradcheck(path: str, seq_len: int) -> None:
    cfg = nsa.NSAConfig(
        dim=4, n_heads=2, n_kv_groups=1, d_k=2, d_v=3, l=2, d=1, l_sel=2, n_sel=3, w=3
    )
    x = inputs(cfg, seq_len, seed=1)
    names = list(x)

    def attention(*values: Tensor) -> Tensor:
        return run(dict(zip(names, values, strict=True)), cfg, path)

    assert torch.autograd.gradcheck(attention, list(x.values()), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_i_gradcheck_of_the_layer(phi: str) -> None:
    module = layer(phi, "batched")
    x = torch.randn(1, 14, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,), eps=1e-6, atol=1e-7)


# (k)
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("path", ["sequential", "batched", "sdpa"])
@pytest.mark.parametrize("seq_len", [1, 7, 8, 33, 129])
def test_k_path_parity(path: str, seq_len: int, version: str) -> None:
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = []
        for which in ("reference", path):
            x = inputs(SMALL, seq_len, batch=2, seed=seq_len, dtype=dtype)
            out = run(x, SMALL, which, version)
            weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
            found.append([out, *torch.autograd.grad((out * weight).sum(), list(x.values()))])
        for name, a, b in zip(("out", *NAMES), *found, strict=True):
            # A gradient is a sum over queries: roundoff grows with it. (The float32 reference
            # itself is off by 1.03e-5 at a value of 8 on some processors.)
            most = bound * max(1.0, float(a.detach().abs().max()))
            assert gap(a, b) <= most, f"{path} {version} {dtype}: {name} off by {gap(a, b):.1e}"


def test_k_the_cpu_path_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and stretches of the smallest sizes, so that every seam is crossed."""
    x = inputs(SMALL, 301, batch=2)
    whole = run(x, SMALL, "reference")
    truth = torch.autograd.grad(whole.square().sum(), list(x.values()))
    monkeypatch.setattr(cpu_pieces, "PARTIAL_BYTES", 1)
    monkeypatch.setattr(cpu_blocks, "SPLIT", 3)
    monkeypatch.setattr(cpu_pieces, "piece_tokens", lambda *_: 5)
    cpu_pieces.schedule.cache_clear()
    try:
        out, _ = batched_cpu(Branches(**x).grouped(SMALL), SMALL, "v2")
        grads = torch.autograd.grad(out.square().sum(), list(x.values()))
    finally:
        cpu_pieces.schedule.cache_clear()
    assert gap(out, whole) <= 1e-12
    assert all(
        gap(a, b) <= 1e-12 * max(1.0, float(b.abs().max()))
        for a, b in zip(grads, truth, strict=True)
    )


@pytest.mark.parametrize("chunk_bytes", [1 << 11, branches.CHUNK_BYTES])
@pytest.mark.parametrize("d_v", [6, 8])
def test_k_the_sdpa_path_is_the_same_however_it_is_cut(
    d_v: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a few queries; d_v = d_k is what fused kernels take, which keep their masks."""
    cfg = nsa.NSAConfig(**{**vars(SMALL), "d_v": d_v})
    x = inputs(cfg, 131, batch=2)
    whole = run(x, cfg, "reference")
    truth = torch.autograd.grad(whole.square().sum(), list(x.values()))
    monkeypatch.setattr(branches, "CHUNK_BYTES", chunk_bytes)
    out = run(x, cfg, "sdpa")
    grads = torch.autograd.grad(out.square().sum(), list(x.values()))
    assert gap(out, whole) <= 1e-12
    assert all(
        gap(a, b) <= 1e-12 * max(1.0, float(b.abs().max()))
        for a, b in zip(grads, truth, strict=True)
    )


@pytest.mark.parametrize("path", PATHS)
def test_nothing_visible_contributes_exactly_zero(path: str) -> None:
    x = only(inputs(SMALL, 30), 0)
    out = run(x, SMALL, path)
    assert bool((out[:, : SMALL.l - 1] == 0).all()) and bool((out[:, SMALL.l - 1 :] != 0).any())


@pytest.mark.parametrize("path", PATHS)
def test_large_scores_neither_overflow_nor_underflow(path: str) -> None:
    """Scores of plus and minus thousands: one key takes all, hidden ones still nothing."""
    x = {n: v.detach().float() for n, v in inputs(SMALL, 90).items()}
    x["q"] = x["q"] * 300
    assert bool(run(x, SMALL, path).isfinite().all())
    # Where everything is selected, rounding cannot choose other blocks.
    early = {n: v[:, :32] for n, v in x.items()}
    wide = {n: v.double() for n, v in early.items()}
    assert gap(run(early, SMALL, path).double(), run(wide, SMALL, "reference")) <= 1e-2


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_is_reported_not_hidden(path: str) -> None:
    x = {n: v.detach().clone() for n, v in inputs(SMALL, 60).items()}
    x["q"][0, 3] = float("nan")
    out = run(x, SMALL, path)
    assert bool(out[0, 3].isnan().all()) and bool(out[0, :3].isfinite().all())
