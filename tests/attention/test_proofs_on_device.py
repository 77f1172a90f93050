"""The definition's properties (a) to (k), on every path and in the types that train, on a device.

Each body runs on a CPU at a small shape, by each path in float64 and in the types that train; and
on a GPU at the production shape, with each kernel that SDPA has.
Bounds are those of the trainer's self-test; in float64 nothing but the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa.attention import attend
from nsa.attention.branches import Branches
from nsa.attention.selection import block_scores, overlap_weights
from nsa.config import Kernels, Phi, Way
from nsa.projection import Columns, rotations, split_together
from nsa.rounding import error_of
from nsa.witness.equations import Bound, measure
from tests.attention.test_proofs import WAYS, dense, gap, inputs, only

SMALL = nsa.NSAConfig(
    dim=48, n_heads=6, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=20
)
BACKENDS = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True)
class Where:
    """Device, type, shape, lengths, and how the branches run."""

    device: str
    dtype: torch.dtype
    cfg: nsa.NSAConfig
    lengths: tuple[int, ...]
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

    def inputs(self, seq_len: int, cfg: nsa.NSAConfig | None = None) -> dict[str, Tensor]:
        """Two sequences of random numbers."""
        made = inputs(cfg or self.cfg, seq_len, batch=2, seed=seq_len, dtype=self.dtype)
        return {n: x.detach().to(self.device).requires_grad_() for n, x in made.items()}

    def run(
        self, x: dict[str, Tensor] | Branches, cfg: nsa.NSAConfig | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and blocks by the path, or what kernels of the package there are."""
        return attend(x if isinstance(x, Branches) else Branches(**x), cfg or self.cfg, self.way)

    @property
    def way(self) -> Way:
        """How attention runs."""
        return replace(WAYS[self.path], kernels=self.kernels)


def _everywhere() -> Iterator[object]:
    for path in WAYS:
        yield Where(device="cpu", dtype=torch.float64, cfg=SMALL, lengths=(5, 83), path=path)
    for dtype in (torch.float32, torch.bfloat16):
        yield Where(device="cpu", dtype=dtype, cfg=SMALL, lengths=(5, 83))
    for backend in (None, *BACKENDS):
        where = Where(
            device="cuda", dtype=torch.bfloat16, cfg=nsa.NSAConfig(), lengths=(20, 2048, 2051),
            backend=backend,
        )  # fmt: skip
        yield pytest.param(where, marks=pytest.mark.gpu)
    for dtype in (torch.bfloat16, torch.float16):
        ours = replace(where, dtype=dtype, kernels="triton", backend=None)
        yield pytest.param(ours, marks=pytest.mark.gpu)


@pytest.fixture(params=_everywhere(), ids=str)
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    found: Where = request.param
    if found.backend is None:
        yield found
        return
    with sdpa_kernel([BACKENDS[found.backend]]):
        _skip_what_it_refuses(found)
        yield found


def _skip_what_it_refuses(where: Where) -> None:
    """Where this kernel does not take the masks, as torch says it."""
    x = where.inputs(where.lengths[-1])
    try:
        where.run(x)[0].sum().backward()
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No valid execution" not in str(error):
            raise
        refusal = str(error).splitlines()[0]
        pytest.skip(f"SDPA refuses {where.backend} for these masks: {refusal}")


def close(where: Where, got: Tensor, right: Tensor) -> bool:
    """Is it what rounding explains?"""
    error = error_of(got.detach(), right.detach())
    return error.whole <= where.bound.whole and error.row <= where.bound.row


@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_a_every_parameter_gets_a_gradient(where: Where, phi: Phi) -> None:
    torch.manual_seed(0)
    cfg = replace(where.cfg, phi=phi)
    layer = nsa.NSAAttention(cfg, where.way).to(where.device, where.dtype)
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
        if where.path == "batched":  # sums are cut by what all tokens choose
            assert gap(out[:, :cut], changed[:, :cut]) <= 1e-12
        else:
            assert torch.equal(out[:, :cut], changed[:, :cut])
        assert not torch.equal(out[:, cut:], changed[:, cut:])


def test_c_products_depend_on_the_difference_of_positions(where: Where) -> None:
    cfg, seq_len = where.cfg, where.lengths[-1]
    y = torch.randn(Columns(cfg=cfg).total, generator=torch.Generator().manual_seed(1))
    y = y.to(where.device, where.dtype).expand(1, seq_len, -1)
    bias = torch.zeros(cfg.n_heads * 3, device=where.device)
    at = torch.arange(seq_len, device=where.device)
    parts = split_together(y, bias, rotations(at, cfg.d_k, 1e4, where.dtype), cfg)
    q, k = parts.q[0, 0, :, 0].double(), parts.k_win[0, 0].double()
    scale = float(q[0].norm() * k[0].norm())
    for distance in (0, 1, 17):
        products = (q[distance:] * k[: seq_len - distance]).sum(-1)
        spread = float(products.max() - products.min())
        assert spread <= where.bound.whole * scale
    assert abs(float(q[4] @ k[0]) - float(q[4] @ k[4])) > where.bound.whole * scale


@pytest.mark.parametrize("branch", ["sel", "win"])
def test_d_everything_visible_is_dense(where: Where, branch: str) -> None:
    for seq_len in where.lengths:
        blocks = where.cfg.n_blocks(seq_len)
        cfg = replace(where.cfg, n_sel=max(3, blocks), w=seq_len)
        x = only(where.inputs(seq_len, cfg), ("cmp", "sel", "win").index(branch))
        wide = {n: v.detach().double() for n, v in x.items()}
        assert close(where, where.run(x, cfg)[0], dense(wide, branch, cfg))


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_e_each_branch_depends_on_its_keys(where: Where, branch: str) -> None:
    x = only(where.inputs(where.lengths[-1]), ("cmp", "sel", "win").index(branch))
    found = where.run(x)[0]
    grads = torch.autograd.grad(found.float().sum(), list(x.values()), materialize_grads=True)
    used = {name for name, grad in zip(x, grads, strict=True) if bool((grad != 0).any())}
    assert used == {"q", f"k_{branch}", f"v_{branch}", "gates"}


def test_f_blocks_of_one_token_collapse_to_dense(where: Where) -> None:
    cfg = replace(where.cfg, l=1, d=1, l_sel=1, n_sel=70, w=70)
    x = where.inputs(70, cfg)
    wide = {n: v.detach().double() for n, v in x.items()}
    for place, branch in enumerate(("cmp", "sel", "win")):
        right = dense(only(wide, place), branch, cfg)
        assert close(where, where.run(only(x, place), cfg)[0], right)


def test_g_overlap_weights(where: Where) -> None:
    assert overlap_weights(nsa.NSAConfig()) == [(-1, 1), (0, 2), (1, 2), (2, 2), (3, 1)]
    p = torch.zeros(2, 12, device=where.device)
    p[0, 4] = p[1, 3] = 1.0  # tokens 64..95, inside block 1, and 48..79, in blocks 0 and 1
    found = block_scores(p, 3, nsa.NSAConfig()).tolist()
    assert found == [[0.0, 2.0, 0.0], [1.0, 1.0, 0.0]]


def test_h_forced_blocks_are_inside_n(where: Where) -> None:
    for seq_len in where.lengths:
        x = where.inputs(seq_len)
        blocks = where.run(x)[1]
        current = torch.arange(seq_len, device=where.device)[None, :, None] // where.cfg.l_sel
        for forced in (current * 0, (current - 1).clamp_min(0), current):
            assert bool((blocks == forced[..., None]).any(-1).all())
        assert bool((blocks <= current[..., None]).all())
        count = (current + 1).clamp_max(where.cfg.n_sel)
        assert bool(((blocks >= 0).sum(-1) == count).all())


def test_i_gradcheck_in_float64(where: Where) -> None:
    """Against differences; in the types that train they are held to the equations in (k)."""
    cfg = nsa.NSAConfig(
        dim=4, n_heads=2, n_kv_groups=1, d_k=2, d_v=3, l=2, d=1, l_sel=2, n_sel=3, w=3
    )
    given = inputs(cfg, 7, seed=1)
    x = {n: v.detach().to(where.device).requires_grad_() for n, v in given.items()}
    plain = replace(where, kernels="masked")  # the package's know no float64

    def attention(*values: Tensor) -> Tensor:
        return plain.run(dict(zip(x, values, strict=True)), cfg)[0]

    with sdpa_kernel([SDPBackend.MATH]):
        assert torch.autograd.gradcheck(attention, list(x.values()), eps=1e-6, atol=1e-7)


def test_j_heads_of_a_group_read_the_same_blocks(where: Where) -> None:
    seq_len, cfg = where.lengths[-1], where.cfg
    x = only(where.inputs(seq_len), 1)
    out, blocks = where.run(x)
    for t in (seq_len // 2, seq_len - 1):
        for head in range(cfg.n_heads):
            group = head // cfg.heads_per_group
            (grad,) = torch.autograd.grad(
                out[0, t, head].float().sum(), x["v_sel"], retain_graph=True
            )
            read = grad[0].abs().sum(-1).nonzero()
            assert set(read[:, 1].tolist()) == {group}
            found = set((read[:, 0] // cfg.l_sel).tolist())
            assert found == {j for j in blocks[0, t, group].tolist() if j >= 0}


@pytest.mark.parametrize("second", [False, True])
def test_k_outputs_and_gradients_are_the_equations(where: Where, second: bool) -> None:
    """Alone, and as the second of two sequences, at odd lengths and below one block."""

    def run(x: Branches) -> tuple[Tensor, Tensor]:
        if not second:
            return where.run(x)
        first = {n: v.detach().flip(1) for n, v in x.named().items()}
        both = {n: torch.cat((first[n], v)) for n, v in x.named().items()}
        out, blocks = where.run(both)
        return out[1:], blocks[1:]

    for seq_len in where.lengths:
        device = torch.device(where.device)
        found = measure(run, where.cfg, seq_len, dtype=where.dtype, device=device)
        assert found.problems == [], f"S={seq_len}"
        assert max(found.row.values()) <= where.bound.row, f"S={seq_len}"
