"""The definition's properties, and its edges: ties, nothing visible, huge scores, NaN.

Each body runs on a CPU at a small shape, by each path in float64 and in the types that train; and
on a GPU at the production shape, with each kernel that SDPA has. (j), that the heads of a group
read the same blocks, is in `nsa/tests`.
Bounds are those of the trainer's self-test; in float64 nothing but the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.attention import attend, sdpa
from nsa.attention.branches import Branches
from nsa.attention.selection import block_scores, overlap_weights
from nsa.config import Kernels, NSAConfig, Phi, Way
from nsa.layer import NSAAttention, columns, n_columns, rotations, split_projection
from nsa.rounding import error_of
from nsa.witness.self_test import Bound, measure
from tests.factory.tables import table

WAYS = {
    **{path: Way(path=path) for path in ("sequential", "batched")},
    "sdpa": Way(force_sdpa=True),
}
SMALL = NSAConfig(
    dim=48, n_heads=6, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=20
)
BRANCHES = ("cmp", "sel", "win")
BACKENDS = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True)
class Where:
    """Device, type, shape, lengths, and how the branches run."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    cfg: NSAConfig = SMALL
    lengths: tuple[int, ...] = (5, 83)
    kernels: Kernels = "masked"
    backend: str | None = None
    path: str = "sdpa"

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.device}-{kind}-{self.kernels}-{self.backend or self.path}"

    @property
    def bound(self) -> Bound:
        """What rounding explains."""
        exact = self.dtype == torch.float64
        return Bound(whole=1e-12, row=1e-12, scores=1e-12) if exact else Bound.of(self.dtype)

    def inputs(self, seq_len: int, cfg: NSAConfig | None = None) -> dict[str, Tensor]:
        """Two sequences of random numbers."""
        made = inputs(cfg or self.cfg, seq_len, batch=2, dtype=self.dtype)
        return {n: x.detach().to(self.device).requires_grad_() for n, x in made.items()}

    def run(
        self, x: dict[str, Tensor] | Branches, cfg: NSAConfig | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and blocks."""
        return attend(x if isinstance(x, Branches) else Branches(**x), cfg or self.cfg, self.way)

    @property
    def way(self) -> Way:
        """How attention runs."""
        return replace(WAYS[self.path], kernels=self.kernels)


def _everywhere() -> Iterator[object]:
    yield from (Where(path=path) for path in WAYS)
    yield from (Where(dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    gpu = Where(
        device="cuda", dtype=torch.bfloat16, cfg=NSAConfig(), lengths=(20, 2048, 2051)
    )  # fmt: skip
    yield from (
        pytest.param(where, marks=pytest.mark.gpu)
        for where in (
            *(replace(gpu, backend=backend) for backend in (None, *BACKENDS)),
            *(replace(gpu, dtype=kind, kernels="triton") for kind in (gpu.dtype, torch.float16)),
        )
    )


@pytest.fixture(params=_everywhere(), ids=str)
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    """One of them, skipped where its kernel does not take the masks, as torch says it."""
    found: Where = request.param
    if found.backend is None:
        yield found
        return
    with sdpa_kernel([BACKENDS[found.backend]]):
        try:
            found.run(found.inputs(found.lengths[-1]))[0].sum().backward()
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No valid execution" not in str(error):
                raise
            pytest.skip(f"SDPA refuses {found.backend}: {str(error).splitlines()[0]}")
        yield found


def inputs(
    cfg: NSAConfig, seq_len: int, *, batch: int = 1, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seq_len)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(batch, seq_len, *shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype)

    x = {"q": normal(cfg.n_heads, cfg.d_k)}
    for branch in BRANCHES:
        x[f"k_{branch}"] = normal(cfg.n_kv_groups, cfg.d_k)
        x[f"v_{branch}"] = normal(cfg.n_kv_groups, cfg.d_v)
    x["gates"] = normal(cfg.n_heads, 3).sigmoid()
    return {name: value.requires_grad_() for name, value in x.items()}


def only(x: dict[str, Tensor], branch: str) -> dict[str, Tensor]:
    """The same inputs with one gate open."""
    gates = torch.zeros_like(x["gates"])
    gates[..., BRANCHES.index(branch)] = 1.0
    return {**x, "gates": gates.requires_grad_()}


def dense(x: dict[str, Tensor], branch: str, cfg: NSAConfig) -> Tensor:
    """Dense causal attention in float64 with a branch's keys and values, by no kernel of SDPA."""
    q = x["q"].detach().double().transpose(1, 2)
    k, v = (
        x[f"{kind}_{branch}"].detach().double().repeat_interleave(cfg.heads_per_group, 2)
        for kind in "kv"
    )
    scores = q @ k.permute(0, 2, 3, 1) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    p = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (p @ v.transpose(1, 2)).transpose(1, 2)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_a_every_parameter_gets_a_gradient(where: Where, phi: Phi) -> None:
    torch.manual_seed(0)
    cfg = replace(where.cfg, phi=phi)
    layer = NSAAttention(cfg, where.way).to(where.device, where.dtype)
    x = torch.randn(1, where.lengths[-1], where.cfg.dim).to(where.device, where.dtype)
    layer(x).float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        rows = parameter.grad.reshape(parameter.shape[0], -1)
        assert bool((rows.abs().sum(1) > 0).all()), f"{name} has rows without a gradient"


def test_b_the_future_changes_nothing(where: Where) -> None:
    seq_len = where.lengths[-1]
    x = where.inputs(seq_len)
    for cut in (1, seq_len // 3, seq_len - 1):
        other = {n: v.detach().clone() for n, v in x.items()}
        for value in other.values():
            value[:, cut:] *= -7
        (out, blocks), (changed, others) = where.run(x), where.run(other)
        assert torch.equal(blocks[:, :cut], others[:, :cut])
        # By "batched" sums are cut by what all tokens choose.
        assert gap(out[:, :cut], changed[:, :cut]) <= (1e-12 if where.path == "batched" else 0)
        assert not torch.equal(out[:, cut:], changed[:, cut:])


def test_c_products_depend_on_the_difference_of_positions() -> None:
    y = torch.randn(n_columns(SMALL), dtype=torch.float64).expand(1, 83, -1)
    turns = rotations(torch.arange(83), SMALL.d_k, 1e4, torch.float64)
    parts = split_projection(y, torch.zeros(SMALL.n_heads * 3), turns, SMALL)
    q, k = parts.q[0, :, 0], parts.k_win[0, :, 0]
    for distance in (0, 1, 17):
        products = (q[distance:] * k[: 83 - distance]).sum(-1)
        assert float(products.max() - products.min()) <= 1e-12 * float(q[0].norm() * k[0].norm())
    assert abs(float(q[4] @ k[0]) - float(q[4] @ k[4])) > 1e-3


@pytest.mark.parametrize("branch", ["sel", "win"])
def test_d_everything_visible_is_dense(where: Where, branch: str) -> None:
    for seq_len in where.lengths:
        cfg = replace(where.cfg, n_sel=max(3, where.cfg.n_blocks(seq_len)), w=seq_len)
        check_dense(where, branch, seq_len, cfg)


@pytest.mark.parametrize("branch", BRANCHES)
def test_f_blocks_of_one_token_collapse_to_dense(where: Where, branch: str) -> None:
    check_dense(where, branch, 70, replace(where.cfg, l=1, d=1, l_sel=1, n_sel=70, w=70))


def check_dense(where: Where, branch: str, seq_len: int, cfg: NSAConfig) -> None:
    x = only(where.inputs(seq_len, cfg), branch)
    error = error_of(where.run(x, cfg)[0].detach(), dense(x, branch, cfg))
    assert error.whole <= where.bound.whole and error.row <= where.bound.row


@pytest.mark.parametrize("branch", BRANCHES)
def test_e_each_branch_depends_on_its_keys(where: Where, branch: str) -> None:
    x = only(where.inputs(where.lengths[-1]), branch)
    found = where.run(x)[0]
    grads = torch.autograd.grad(found.float().sum(), list(x.values()), materialize_grads=True)
    used = {name for name, grad in zip(x, grads, strict=True) if bool((grad != 0).any())}
    assert used == {"q", f"k_{branch}", f"v_{branch}", "gates"}


def test_g_overlap_weights() -> None:
    assert overlap_weights(NSAConfig()) == [(-1, 1), (0, 2), (1, 2), (2, 2), (3, 1)]
    p = torch.zeros(2, 12)
    p[0, 4] = p[1, 3] = 1.0  # tokens 64..95, inside block 1, and 48..79, in blocks 0 and 1
    found = block_scores(p, 3, NSAConfig()).tolist()
    assert found == [[0.0, 2.0, 0.0], [1.0, 1.0, 0.0]]


def test_h_forced_blocks_are_inside_n(where: Where) -> None:
    for seq_len in where.lengths:
        blocks = where.run(where.inputs(seq_len))[1]
        current = torch.arange(seq_len, device=where.device)[None, :, None] // where.cfg.l_sel
        for forced in (current * 0, (current - 1).clamp_min(0), current):
            assert bool((blocks == forced[..., None]).any(-1).all())
        count = (current + 1).clamp_max(where.cfg.n_sel)
        assert bool(((blocks >= 0).sum(-1) == count).all())


@pytest.mark.parametrize("path", WAYS)
def test_i_gradcheck_in_float64(path: str) -> None:
    """Against differences; in the types that train they are held to the equations in (k)."""
    cfg = NSAConfig(dim=4, n_heads=2, n_kv_groups=1, d_k=2, d_v=3, l=2, d=1, l_sel=2, n_sel=3, w=3)
    x = inputs(cfg, 7)

    def attention(*values: Tensor) -> Tensor:
        return attend(Branches(**dict(zip(x, values, strict=True))), cfg, WAYS[path])[0]

    assert torch.autograd.gradcheck(attention, list(x.values()), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("second", [False, True])
def test_k_outputs_and_gradients_are_the_equations(where: Where, second: bool) -> None:
    """Alone, and as the second of two sequences, at odd lengths and below one block."""

    def run(x: Branches) -> tuple[Tensor, Tensor]:
        if not second:
            return where.run(x)
        both = {n: torch.cat((v.detach().flip(1), v)) for n, v in x.named().items()}
        out, blocks = where.run(both)
        return out[1:], blocks[1:]

    for seq_len in where.lengths:
        device = torch.device(where.device)
        found = measure(run, where.cfg, seq_len, dtype=where.dtype, device=device)
        assert found.problems == [], f"S={seq_len}"
        assert max(found.row.values()) <= where.bound.row, f"S={seq_len}"


@pytest.mark.parametrize("width", [2, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("real", [False, True])
def test_queries_and_keys_turn_in_pairs(width: int, dtype: torch.dtype, real: bool) -> None:
    """Complex numbers and real ones, which a compiler is given, turn alike."""
    cfg = replace(SMALL, d_k=width)
    turns = rotations(torch.arange(5), width, 100.0, dtype)
    turns = torch.view_as_real(turns) if real else turns
    made = torch.randn(1, 5, n_columns(cfg)).to(dtype)
    target = split_projection(made, torch.zeros(cfg.n_heads * 3), turns, cfg).k_win
    source = made[..., columns(cfg)["k_win"]].unflatten(-1, (-1, width)).float()
    angle = torch.arange(5.0)[:, None] * 100.0 ** (-torch.arange(0.0, width, 2) / width)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = source[..., 0::2], source[..., 1::2]
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert gap(target[..., 0::2].float(), a * cos - b * sin) <= bound
    assert gap(target[..., 1::2].float(), a * sin + b * cos) <= bound


@pytest.mark.parametrize("path", WAYS)
def test_edges(path: str) -> None:
    """What sees no key adds exactly nothing; scores of thousands leave one key; NaN is shown."""
    x = {n: v.detach().float() for n, v in inputs(SMALL, 60).items()}

    def run(x: dict[str, Tensor], way: Way = WAYS[path]) -> Tensor:
        return attend(Branches(**x), SMALL, way)[0]

    out = run(only(x, "cmp"))
    assert not out[:, : SMALL.l - 1].any() and bool((out[:, SMALL.l - 1 :] != 0).any())
    huge = {**x, "q": x["q"] * 300}
    assert bool(run(huge).isfinite().all())
    # Where everything is selected, rounding cannot choose other blocks.
    early = {n: v[:, :32] for n, v in huge.items()}
    wide = {n: v.double() for n, v in early.items()}
    assert gap(run(early).double(), run(wide, WAYS["sequential"])) <= 1e-2
    x["q"][0, 3] = float("nan")
    out = run(x)
    assert bool(out[0, 3].isnan().all()) and bool(out[0, :3].isfinite().all())


@table(__file__, "pieces_of_rows")
def test_pieces_are_equal_and_not_short(n_rows: int, pieces: int) -> None:
    """6 query heads of 2,017 queries, a prime number, make no more than 6; 8,191 is prime."""
    assert sdpa._pieces(n_rows, torch.device("cuda")) == pieces
    assert sdpa._pieces(n_rows, torch.device("cpu")) == 1


@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_the_sum_over_rows_does_not_depend_on_the_pieces(
    monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Two chunks of rows, the second added to the first, against an explicit sum in float64."""
    monkeypatch.setattr(sdpa, "_pieces", lambda *_: pieces)
    a, b = (torch.randn(3, 24, width, dtype=torch.float64) for width in (5, 4))
    first = sdpa._add_product(None, a, b)
    both = sdpa._add_product(first.clone(), a, 2 * b)
    right = (a[..., None] * b[:, :, None]).sum(1)
    torch.testing.assert_close(first, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(both, 3 * right, rtol=1e-12, atol=1e-12)
