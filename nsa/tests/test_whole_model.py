"""The model that the trainer builds is the one of the equations: outputs, loss and gradients.

Both sides get the same random weights, in float64. The other side, `nsa.tests.truth`, is the oracle
in NumPy: it has no gradients, so the trainer's are held against differences of the oracle's loss.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from nsa.attention.branches import part_shape
from nsa.attention.selection import full_float32
from nsa.config import NSAConfig
from nsa.data import Batch
from nsa.layer import columns
from nsa.tests import built, maths
from nsa.tests.truth import SLOPES, Truth, cross_entropy
from nsa.witness import oracle
from nsa.witness.equations import judge

# Float64 rounds logits of size 10 at 2e-15, and they come out of sums of tens of terms, each of
# them rounded too: 2e-14 where this was written.
LOGITS = 1e-12
# The trainer takes the loss in float32, from logits that it rounds to 2**-24 of their size.
STEP_LOSS = 1e-6
# A part that matters changes some logit, or some output of its layer, by more than this.
MATTERS = 1e-4
LENGTHS = (1, 5, 8, 33, 71)
LONG = LENGTHS[-1]
# Longer than the sequences of production: too long for the oracle's whole, but not for its layer.
FAR = 2_100
# Fast paths cut a sequence into pieces from some length on, and float32 has code of its own: 1e-6
# where this was written, 0.1 and more for a piece that is left out.
SEVERAL, SINGLE = 300, 1e-4
# Few enough tokens that every block is chosen. bf16 rounds by 2^-9 in every product: gradients were
# off by 5 % at most where this was written, and are by their own size where a part is wrong.
ALL_BLOCKS, HALF = 31, 0.15

Case = tuple[str, int]
pytestmark = pytest.mark.usefixtures("settings_of_torch")
settings_of_torch = built.settings_of_torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole_model")


@cache
def truth(case: str, seq_len: int, folder: Path) -> Truth:
    """Worked out once for all ways to run: the weights are the same."""
    return Truth(case, built.build(case, "batched v2", folder), seq_len)


def distance(found: torch.Tensor, expected: oracle.Array) -> float:
    return float(np.abs(found.detach().cpu().numpy() - expected).max())


def lengths(way: str) -> tuple[int, ...]:
    """Token by token takes a second for the long one; the short ones have every branch."""
    return LENGTHS[:-1] if way.startswith("token") else LENGTHS


@pytest.mark.parametrize("way", list(built.WAYS))
@pytest.mark.parametrize("case", list(built.CASES))
def test_outputs_are_the_equations(case: str, way: str, folder: Path) -> None:
    """Logits, selected blocks and gates of every layer, and the loss that the trainer reports."""
    engine, made = built.build(case, way, folder), list[torch.Tensor]()
    engine.model.register_forward_hook(lambda _, inputs, logits: made.append(logits))
    for seq_len in lengths(way):
        expected = truth(case, seq_len, folder)
        loss = engine.loss(torch.from_numpy(expected.tokens).to(engine.device))
        off = distance(made.pop(), expected.output.logits)
        assert off <= LOGITS, f"{way}, S={seq_len}: logits are off by {off:.1e}"
        layers = zip(built.attentions(engine.model), expected.output.layers, strict=True)
        for (layer, at), blocks in zip(layers, expected.output.blocks, strict=True):
            assert layer.last_blocks is not None and layer.last_gates is not None
            assert np.array_equal(layer.last_blocks.cpu().numpy(), blocks), f"S={seq_len}: blocks"
            gates = at.gates.reshape(*at.gates.shape[:2], layer.cfg.n_kv_groups, -1, 3)
            assert distance(layer.last_gates.transpose(1, 2), gates) <= LOGITS
        assert abs(loss.item() - expected.loss) <= STEP_LOSS * expected.loss


@pytest.mark.parametrize("way", list(built.WAYS))
@pytest.mark.parametrize("case", list(built.CASES))
def test_gradients_are_the_equations(case: str, way: str, folder: Path) -> None:
    """Every group of parameters; where S < l, a gradient of 0 for what compresses."""
    engine = built.build(case, way, folder)
    for seq_len in (lengths(way)[1], lengths(way)[-1]):
        expected = truth(case, seq_len, folder)
        built.backward(engine, expected.tokens)
        expected.check_gradients(engine, SLOPES)


@pytest.mark.parametrize("way", ["batched v2", "sdpa"])
@pytest.mark.parametrize("case", list(built.CASES))
def test_chunks_of_queries_change_nothing(
    monkeypatch: pytest.MonkeyPatch, case: str, way: str, folder: Path
) -> None:
    """Queries are cut where their masks are too many bytes, which no short sequence reaches."""
    maths.cut_small(monkeypatch)
    engine, expected = built.build(case, way, folder), truth(case, LONG, folder)
    off = distance(built.forward(engine, expected.tokens), expected.output.logits)
    assert off <= LOGITS, f"{way}: logits are off by {off:.1e}"
    built.backward(engine, expected.tokens)
    expected.check_gradients(engine, SLOPES)


@pytest.mark.parametrize("case", list(built.CASES))
def test_the_step_is_the_equations(case: str, folder: Path) -> None:
    """`Engine.compute` over micro-batches of a row each: mean loss, gradients, and their norm."""
    engine, expected = built.build(case, "batched v2", folder), truth(case, LONG, folder)
    batches = [Batch(tokens=torch.from_numpy(row[None])) for row in expected.tokens]
    outcome = engine.compute(batches)
    assert abs(float(outcome.loss) - expected.loss) <= STEP_LOSS * expected.loss
    expected.check_gradients(engine, 10 * STEP_LOSS)
    squares = sum(float(p.grad.square().sum()) for p in engine.model.parameters())
    assert float(outcome.norm) == pytest.approx(squares**0.5, rel=STEP_LOSS)


@pytest.mark.parametrize("case", list(built.CASES))
def test_float32_over_several_pieces_has_the_gradients_of_masks(case: str, folder: Path) -> None:
    """In the type that trains, over sequences that are longer than a piece; the other side is
    the path by masks in float64, which the equations prove above.
    """
    exact, single = built.build(case, "sdpa", folder), built.build(case, "batched v2", folder)
    single.model.float()
    tokens = built.tokens(SEVERAL)
    wanted = built.gradients(exact, tokens)
    with full_float32():
        found = built.gradients(single, tokens, torch.float32)
    for ours, theirs in zip(
        built.attentions(single.model), built.attentions(exact.model), strict=True
    ):
        assert ours.last_blocks is not None and theirs.last_blocks is not None
        assert torch.equal(ours.last_blocks, theirs.last_blocks), "other blocks were chosen"
    check_near(found, wanted, SINGLE)


def check_near(
    found: dict[str, oracle.Array], wanted: dict[str, oracle.Array], bound: float
) -> None:
    """Gradients, each within a share of itself."""
    for name, gradient in wanted.items():
        size = float(np.linalg.norm(gradient))
        off = float(np.linalg.norm(found[name] - gradient))
        assert off <= bound * size, f"d {name} is off by {off / size:.1e} of itself"


@pytest.mark.parametrize("case", list(built.CASES))
def test_bf16_has_the_gradients_of_float64_but_for_its_rounding(case: str, folder: Path) -> None:
    """In the precision of production, where code may be another; all blocks are chosen, so that
    rounding cannot choose others.
    """
    exact = built.build(case, "sdpa", folder)
    half = built.build(case, "batched v2", folder, precision="bf16")
    half.model.float()
    tokens = built.tokens(ALL_BLOCKS)
    wanted = built.gradients(exact, tokens)
    half.model.zero_grad()
    made: list[torch.Tensor] = []
    half.model.head.register_forward_hook(lambda _, inputs, logits: made.append(logits))
    loss = half.loss(torch.from_numpy(tokens).to(half.device))
    assert made[0].dtype == torch.bfloat16, "the model does not run in bf16"
    # The step's numbers are of float32, and a loss of bf16 has steps of 0.02 nats.
    (logits,) = (one.detach().double().cpu().numpy() for one in made)
    exact_loss = cross_entropy(logits, tokens[:, 1:])
    told = f"the loss of the step's own logits is {loss.item()!r}, not {exact_loss!r}"
    assert abs(loss.item() - exact_loss) <= STEP_LOSS * exact_loss, told
    loss.backward()
    check_near(built.held(half), wanted, HALF)


@pytest.mark.parametrize("case", list(built.CASES))
def test_every_parameter_is_proven(case: str, folder: Path) -> None:
    """Each is in one group, rows and all; each group matters; names and rows are the trainer's."""
    engine, expected = built.build(case, "batched v2", folder), truth(case, LONG, folder)
    covered = {name: np.zeros(value.shape) for name, value in expected.weights.items()}
    for group in expected.groups.values():
        for name, rows in group.members:
            covered[name][rows] += 1
    assert all((covered[name] == 1).all() for name, _ in engine.model.named_parameters())
    for name, slopes in expected.slopes.items():
        assert np.abs(slopes).max() > 1e-5, f"{name} does not matter: {slopes}"
    cfg = expected.cfg.attention
    ours = oracle.in_proj_rows(cfg)
    assert {n: rows for n, (rows, _, _) in ours.items()} == columns(cfg)
    assert {n: row[1:] for n, row in ours.items()} == {n: part_shape(n, cfg) for n in ours}


@pytest.mark.parametrize("case", list(built.CASES))
def test_every_gate_and_branch_matters(case: str, folder: Path) -> None:
    """Shut in the oracle, one by one, none can hide: the trainer's model differs by then."""
    engine, expected = built.build(case, "batched v2", folder), truth(case, LONG, folder)
    logits = built.forward(engine, expected.tokens)
    heads, blocks = expected.cfg.attention.n_heads, expected.output.blocks
    for number in range(expected.cfg.n_layers):
        name = f"layers.{number}.attention.gate_bias"
        open_ = expected.weights[name].reshape(heads, 3)
        single = [(h, branch) for h in range(heads) for branch in range(3)]
        for place in [*single, *((slice(None), branch) for branch in range(3))]:
            shut = open_.copy()
            shut[place] = -np.inf
            other = expected.forward({**expected.weights, name: shut.ravel()}, blocks=blocks)
            assert distance(logits, other.logits) > MATTERS, f"layer {number}: {place}"


def judged(
    cfg: NSAConfig, found: oracle.Attended, blocks: oracle.Index, at: oracle.Index
) -> tuple[int, torch.Tensor]:
    """Illegal choices among blocks at these positions, and what each leaves out above a taken."""
    tensors = (torch.from_numpy(x) for x in (blocks, found.scores, at[:, None]))
    illegal, _, gaps = judge(*tensors, cfg)
    return illegal, gaps


@pytest.mark.parametrize("case", list(built.CASES))
def test_selection_selects(case: str, folder: Path) -> None:
    """More blocks are visible than taken; taken are the best, by a margin far above rounding."""
    expected = truth(case, LONG, folder)
    cfg = expected.cfg.attention
    assert (LONG - 1) // cfg.l_sel + 1 > cfg.n_sel
    for layer, blocks in zip(expected.output.layers, expected.output.blocks, strict=True):
        illegal, gaps = judged(cfg, layer, blocks, np.arange(LONG))
        assert illegal == 0 and float(gaps.max()) < -1e-7


@pytest.mark.parametrize("way", list(built.WAYS))
def test_ties_go_to_the_lower_block(way: str, folder: Path) -> None:
    """Queries of 0 find all compressed keys equal, and so whole blocks, to the last bit."""
    engine, case = built.build("avg, tied head", way, folder), "avg, tied head"
    rows = oracle.in_proj_rows(built.config(case).attention)["q"][0]
    with torch.no_grad():
        for layer in built.attentions(engine.model):
            layer.in_proj.weight[rows] = 0
    expected = Truth(case, engine, 41)
    built.forward(engine, expected.tokens)
    layers = zip(built.attentions(engine.model), expected.output.blocks, strict=True)
    for layer, blocks in layers:
        assert blocks[0, -1, 0].tolist() == [0, 1, 4, 5], "no tie between blocks 1, 2 and 3"
        assert layer.last_blocks is not None
        assert np.array_equal(layer.last_blocks.cpu().numpy(), blocks)


@pytest.mark.parametrize("case", list(built.CASES))
def test_a_slice_of_a_layer_is_enough(case: str, folder: Path) -> None:
    """The layer's real input at some positions, read with the trainer's own blocks."""
    engine, expected = built.build(case, "batched v2", folder), truth(case, LONG, folder)
    layer, seen = built.attentions(engine.model)[1], []
    layer.register_forward_hook(lambda _, inputs, out: seen.extend((*inputs, out)))
    built.forward(engine, built.tokens(FAR)[:1])
    x, out = (value.detach().cpu() for value in seen)
    at = np.array([0, 6, 40, FAR // 2, FAR - 1])
    found = oracle.attention(
        expected.cfg.attention,
        oracle.below(expected.weights, "layers.1.attention."),
        x.numpy(),
        at=at,
        blocks=layer.last_blocks[:, at].cpu().numpy(),
    )
    assert distance(out[:, at], found.out) <= LOGITS
    assert judged(layer.cfg, found, layer.last_blocks[:, at].cpu().numpy(), at)[0] == 0
    assert distance(out[:, at + 1 - (at == FAR - 1)], found.out) > MATTERS
