"""The layer and the model: sizes, FLOPs, gates, checkpointing, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.attention import choose_path
from nsa.attention.branches import Branches
from nsa.attention.tracing import profile_range
from nsa.config import (
    ModelConfig,
    NSAConfig,
    Way,
    keys_touched,
    model_flops_per_token,
    parameter_count,
)
from nsa.contract import NSAError
from nsa.layer import NSAAttention, columns, gate_stats
from nsa.model import NSALanguageModel
from nsa.witness.profiling import torch_profiler
from tests.factory.tables import table

TINY = NSAConfig(dim=16, n_heads=4, n_kv_groups=2, d_k=6, d_v=5, l=6, d=3, l_sel=6, n_sel=3, w=7)


def model(**changes: object) -> NSALanguageModel:
    torch.manual_seed(0)
    settings = {"vocab_size": 11, "n_layers": 2, "attention": TINY} | changes
    return NSALanguageModel(ModelConfig(**settings))


def test_rows_of_the_projection_are_aligned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,572 columns of 2 bytes are no multiple of 16: the product has 1,576, the weight as ever."""
    columns: list[int] = []

    def noted(x: Tensor, weight: Tensor) -> Tensor:
        columns.append(len(weight))
        return torch.nn.functional.linear(x, weight)

    monkeypatch.setattr("nsa.layer.linear", noted)
    layer = NSAAttention(NSAConfig(), Way(force_sdpa=True))
    layer(torch.randn(1, 70, 768))
    assert columns == [1576] and layer.in_proj.weight.shape == (1572, 768)


@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("tie", [True, False])
def test_parameter_formula_counts_the_real_model(phi: str, tie: bool) -> None:
    made = model(attention=NSAConfig(**{**vars(TINY), "phi": phi}), tie_embeddings=tie)
    assert made.n_parameters() == parameter_count(made.cfg)


@pytest.mark.parametrize("by_sdpa", [False, True])
def test_checkpointing_changes_no_gradient(by_sdpa: bool) -> None:
    tokens = torch.randint(11, (2, 40))
    grads = []
    for on in (False, True):
        # With d_v = d_k kernels of SDPA keep their masks, and those are made again by themselves.
        made = model(
            gradient_checkpointing=on, attention=NSAConfig(**{**vars(TINY), "d_v": 6})
        ).double()
        made.attend_by(Way(force_sdpa=by_sdpa))
        made(tokens).square().mean().backward()
        grads.append([p.grad for p in made.parameters()])
    assert all(float((a - b).abs().max()) <= 1e-15 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("collapsed", [(), (0,), (1,), (0, 1)])
def test_gates_that_have_collapsed_are_not_hidden_by_other_layers(
    collapsed: tuple[int, ...],
) -> None:
    """All gates are equal; in these layers the selected branch alone counts."""
    made = model()
    with torch.no_grad():
        for number, layer in enumerate(made.layers):
            layer.attention.in_proj.weight[columns(TINY)["gates"]] = 0
            if number in collapsed:
                bias = torch.tensor([-50.0, 50.0, -50.0])
                layer.attention.gate_bias.view(4, 3).copy_(bias)
    with pytest.raises(NSAError, match="forward pass"):
        made.gate_numbers()
    made(torch.randint(11, (2, 40)))
    stats, share = gate_stats(made.gate_numbers()), len(collapsed) / 2
    wanted = {"entropy": 0.0, "max_gate": 1.0} if collapsed else {"entropy": 1.0, "max_gate": 1 / 3}
    wanted |= {"entropy_mean": 1 - share, "sel_forced_share": 1.0}
    wanted |= dict.fromkeys(("share_sel", "max_gate_mean"), share + (1 - share) / 3)
    # Blocks of 6 in 40 tokens: 6 queries see 1, 6 see 2, 28 select 3 of at least 3.
    wanted["sel_blocks_mean"] = (6 + 12 + 84) / 40
    assert {name: stats[name] for name in wanted} == pytest.approx(wanted, abs=1e-9)


@table(__file__, "wrong_values")
def test_every_wrong_value_is_named_at_once(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        NSAConfig(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_tensors_are_named_at_once() -> None:
    x = {n: torch.zeros(1, 9, 2, 6) for n in ("k_cmp", "k_sel", "k_win")}
    x |= {n: torch.zeros(1, 9, 2, 5) for n in ("v_cmp", "v_sel")}
    x |= {"q": torch.zeros(1, 9, 4, 6), "v_win": torch.zeros(1, 9, 2, 6).double()}
    with pytest.raises(ValueError) as caught:
        Branches(**x, gates=torch.zeros(1, 9, 4, 2)).check(TINY)
    wrong = (
        "v_win is (1, 9, 2, 6) torch.float64 cpu: must be (1, 9, 2, 5) torch.float32 cpu",
        "gates is (1, 9, 4, 2)",
    )
    assert all(word in str(caught.value) for word in wrong)


def test_the_choice_is_said_with_its_reason() -> None:
    cfg = NSAConfig()
    assert str(choose_path(cfg, 1024)).startswith("cpu_dense (S=1024 <= n_sel*l_sel=1024")
    assert choose_path(cfg, 1025).value == "cpu_block"
    few = choose_path(NSAConfig(n_heads=4, n_kv_groups=2, l_sel=16, l=16, d=8, n_sel=4), 128)
    assert few.value == "cpu_masked" and "S=128 is one product of all queries" in few.reason
    on_cuda = choose_path(cfg, 4096, device="cuda")
    assert on_cuda.value == "sdpa" and "queries by chunks of 256 MiB" in on_cuda.reason


LARGE = ModelConfig(vocab_size=50_304, n_layers=12)
BYTES = ModelConfig(vocab_size=256, n_layers=12)


def test_keys_touched_by_counting() -> None:
    """A small case, token by token, from the definition."""
    cfg = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=5)
    total = 0
    for t in range(30):
        total += sum(1 for i in range(30) if i * 2 + 3 <= t)
        blocks = sorted({0, t // 4, max(0, t // 4 - 1)} if t >= 12 else set(range(t // 4 + 1)))
        total += sum(1 for token in range(t + 1) if token // 4 in blocks)
        total += min(5, t + 1)
    assert keys_touched(cfg, 30) == pytest.approx(total / 30)


@table(__file__, "rooflines")
def test_roofline(peak: float, seq_len: int, large: int, small: int) -> None:
    """Thousand tokens/s at 40 % MFU, of 116.8M and of 78.4M parameters."""
    for cfg, expected in ((LARGE, large), (BYTES, small)):
        flops = model_flops_per_token(cfg, seq_len)
        assert round(0.4 * peak / flops / 1e3) == expected


def test_profiler_ranges_appear() -> None:
    layer, x = NSAAttention(TINY), torch.randn(1, 50, 16)
    for version in ("v1", "v2"):
        layer.way = Way(selection_ranges=version)
        with torch_profiler("cpu") as seen, profile_range("outer"):
            layer(x)
        names = {event.key for event in seen.key_averages()}
        wanted = {"nsa.cmp", "nsa.sel.scores", f"nsa.sel.ranges_{version}"}
        assert wanted | {"nsa.sel.attend", "nsa.win", "nsa.gate", "outer"} <= names
