"""The model that the trainer builds is the one of the equations: outputs, loss and gradients.

Both sides get the same random weights, in float64. The other side, `nsa.tests.truth`, is the oracle
in NumPy: it has no gradients, so the trainer's are held against differences of the oracle's loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nsa.attention.selection import full_float32
from nsa.config import ModelConfig
from nsa.data.source import Batch
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import choose_device, start_ranks
from nsa.model import NSALanguageModel
from nsa.projection import Columns
from nsa.step.engine import Engine
from nsa.step.optimizer import learning_rate
from nsa.tests import built, pieces
from nsa.tests.truth import SLOPES, Truth
from nsa.witness import oracle

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


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """The engine sets these for its process; other tests in this one must not see it."""
    cuda, precision = torch.backends.cuda, torch.get_float32_matmul_precision()
    flags = (
        (cuda.enable_flash_sdp, cuda.flash_sdp_enabled()),
        (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled()),
        (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),
        (cuda.enable_math_sdp, cuda.math_sdp_enabled()),
    )
    yield
    torch.set_float32_matmul_precision(precision)
    for restore, value in flags:
        restore(value)


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
        for (layer, at), blocks in zip(layers, expected.chosen(), strict=True):
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
    pieces.cut_small(monkeypatch)
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
    for name, gradient in wanted.items():
        size = float(np.linalg.norm(gradient))
        off = float(np.linalg.norm(found[name] - gradient))
        assert off <= SINGLE * size, f"d {name} is off by {off / size:.1e} of itself"


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
    exact_loss = oracle.cross_entropy(logits, tokens[:, 1:])
    told = f"the loss of the step's own logits is {loss.item()!r}, not {exact_loss!r}"
    assert abs(loss.item() - exact_loss) <= STEP_LOSS * exact_loss, told
    loss.backward()
    found = built.held(half)
    for name, gradient in wanted.items():
        size = float(np.linalg.norm(gradient))
        off = float(np.linalg.norm(found[name] - gradient))
        assert off <= HALF * size, f"d {name} is off by {off / size:.1e} of itself"


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
    columns = Columns(cfg=expected.cfg.attention)
    ours = oracle.in_proj_rows(columns.cfg)
    assert {n: rows for n, (rows, _, _) in ours.items()} == columns.slices
    assert {n: row[1:] for n, row in ours.items()} == {n: columns.shape(n) for n in ours}


@pytest.mark.parametrize("case", list(built.CASES))
def test_every_gate_and_branch_matters(case: str, folder: Path) -> None:
    """Shut in the oracle, one by one, none can hide: the trainer's model differs by then."""
    engine, expected = built.build(case, "batched v2", folder), truth(case, LONG, folder)
    logits = built.forward(engine, expected.tokens)
    heads, blocks = expected.cfg.attention.n_heads, expected.chosen()
    for number in range(expected.cfg.n_layers):
        name = f"layers.{number}.attention.gate_bias"
        open_ = expected.weights[name].reshape(heads, 3)
        single = [(h, branch) for h in range(heads) for branch in range(3)]
        for place in [*single, *((slice(None), branch) for branch in range(3))]:
            shut = open_.copy()
            shut[place] = -np.inf
            other = expected.forward({**expected.weights, name: shut.ravel()}, blocks=blocks)
            assert distance(logits, other.logits) > MATTERS, f"layer {number}: {place}"


@pytest.mark.parametrize("case", list(built.CASES))
def test_selection_selects(case: str, folder: Path) -> None:
    """More blocks are visible than taken; taken are the best; a worse or illegal choice shows."""
    expected = truth(case, LONG, folder)
    cfg = expected.cfg.attention
    assert (LONG - 1) // cfg.l_sel + 1 > cfg.n_sel
    for layer, blocks in zip(expected.output.layers, expected.chosen(), strict=True):
        good = oracle.judge_selection(cfg, layer, blocks)
        # A margin far above rounding: no machine may choose otherwise.
        assert (good.illegal, good.differing) == (0, 0) and good.shortfall < -1e-7
        last = (LONG - 1) // cfg.l_sel
        left_out = (set(range(last)) - set(blocks[0, -1, 0].tolist())).pop()
        free = (set(blocks[0, -1, 0].tolist()) - {0, last - 1, last}).pop()
        worse, illegal = blocks.copy(), blocks.copy()
        worse[0, -1, 0][worse[0, -1, 0] == free] = left_out
        illegal[1, -1, 1][illegal[1, -1, 1] == last] = left_out
        found = oracle.judge_selection(cfg, layer, worse)
        assert (found.illegal, found.differing) == (0, 1) and found.shortfall > 0
        assert oracle.judge_selection(cfg, layer, illegal).illegal == 1


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
    layers = zip(built.attentions(engine.model), expected.chosen(), strict=True)
    for layer, blocks in layers:
        assert blocks[0, -1, 0].tolist() == [0, 1, 4, 5], "no tie between blocks 1, 2 and 3"
        assert layer.last_blocks is not None
        assert np.array_equal(layer.last_blocks.cpu().numpy(), blocks)


@pytest.mark.parametrize("seq_len", [LONG, FAR])
@pytest.mark.parametrize("case", list(built.CASES))
def test_a_slice_of_a_layer_is_enough(case: str, seq_len: int, folder: Path) -> None:
    """The layer's real input at some positions, read with the trainer's own blocks."""
    engine, expected = built.build(case, "batched v2", folder), truth(case, LONG, folder)
    layer, seen = built.attentions(engine.model)[1], []
    layer.register_forward_hook(lambda _, inputs, out: seen.extend((*inputs, out)))
    built.forward(engine, built.tokens(seq_len)[:1])
    x, out = (value.detach().cpu() for value in seen)
    at = np.array([0, 6, 40, seq_len // 2, seq_len - 1])
    found = oracle.attention(
        expected.cfg.attention,
        oracle.below(expected.weights, "layers.1.attention."),
        x.numpy(),
        positions=at,
        blocks=layer.last_blocks[:, at].cpu().numpy(),
    )
    assert distance(out[:, at], found.out) <= LOGITS
    assert oracle.judge_selection(layer.cfg, found, layer.last_blocks[:, at].cpu()).illegal == 0
    assert distance(out[:, at + 1 - (at == seq_len - 1)], found.out) > MATTERS


@pytest.mark.parametrize("case", list(built.CASES))
def test_the_model_has_the_shape_that_its_config_says(case: str, folder: Path) -> None:
    """A value that is lost on the way is the trainer's own, which no other test would tell."""
    found, wanted = built.build(case, "batched v2", folder).model, built.config(case)
    assert all(layer.cfg == wanted.attention for layer in built.attentions(found))
    shapes = [
        {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for model in (found, NSALanguageModel(wanted))
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("rows", ["few rows", "as many rows as in production"])
def test_weights_begin_normal_as_a_deep_model_needs_them_and_no_two_alike(rows: str) -> None:
    """Deviation 0.02; of what writes into the residual stream 0.02 / sqrt(2 layers), as in GPT-2.

    All within six standard errors of a sample. The shares of a weight below each of its values are
    those of the normal distribution within what Dvoretzky, Kiefer and Wolfowitz allow with 1e-9.
    """
    # Three layers: of two, 1 / layers would be 1 / sqrt(2 layers).
    cfg = replace(built.config("mlp, own head"), n_layers=3)
    if rows != "few rows":
        heads = replace(cfg.attention, n_heads=24, d_k=64, d_v=64)
        cfg = replace(cfg, vocab_size=4096, mlp_ratio=128.0, attention=heads)
    drawn = {name: weight.flatten() for name, weight in _matrices(cfg)}
    for name, weight in drawn.items():
        deep = name.endswith(("attention.out_proj", "mlp.down"))
        wanted = 0.02 / np.sqrt(2 * cfg.n_layers) if deep else 0.02
        begun = f"{name} begins with deviation {weight.std():.3g} and mean {weight.mean():.2g}"
        told = f"{begun}, not {wanted:.3g} and 0"
        assert abs(weight.std() / wanted - 1) < 6 / np.sqrt(2 * weight.size), told
        assert abs(weight.mean()) < 6 * wanted / np.sqrt(weight.size), told
        below = torch.special.ndtr(torch.from_numpy(np.sort(weight) / wanted)).numpy()
        apart = np.abs(below - (np.arange(weight.size) + 0.5) / weight.size).max()
        allowed = np.sqrt(np.log(2e9) / (2 * weight.size))
        assert apart < allowed, f"{name} is not normal: a share of {apart:.2g} lies elsewhere"
    for (one, left), (other, right) in combinations(drawn.items(), 2):
        size = min(left.size, right.size)
        alike = np.corrcoef(left[:size], right[:size])[0, 1]
        assert abs(alike) < 6 / np.sqrt(size), f"{one} and {other} begin alike"
    # Numbers that are used twice, wherever they lie, agree with themselves at some distance: by
    # chance all products at one of n distances are so large with 1e-9.
    whole = np.concatenate([weight / weight.std() for weight in drawn.values()])
    products = np.fft.irfft(np.abs(np.fft.rfft(whole, 2 * whole.size)) ** 2)[1 : whole.size]
    most = np.sqrt(2 * whole.size * np.log(2e9 * whole.size))
    assert np.abs(products).max() < most, "some weights are parts of the numbers of others"


def test_no_two_rows_or_columns_of_a_weight_begin_alike() -> None:
    """Twins get equal gradients and stay twins: half of the units would be trained for nothing.

    By the share of a sphere within an angle of a direction: of m vectors of n normal numbers two
    are closer than this, up to their sign, with a chance of 1e-9.
    """
    for which, n, cosines in _angles():
        if n >= 4:
            nearest = np.sqrt(1 - (1e-9 / cosines.size) ** (2 / (n - 1)))
            assert np.abs(cosines).max() < nearest, f"two {which}"


def _vectors() -> Iterator[tuple[str, NDArray[np.float64]]]:
    """The rows and the columns [m, n] of every weight of a new model, and whose they are."""
    for name, weight in _matrices(built.config("mlp, own head")):
        yield f"rows of {name}", weight
        yield f"columns of {name}", weight.T


def _matrices(cfg: ModelConfig) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """All that a new model draws: weights, and the positions of the compressors."""
    for name, value in NSALanguageModel(cfg).named_parameters():
        if value.dim() > 1:
            yield name.removesuffix(".weight"), value.detach().double().numpy()


def _angles() -> Iterator[tuple[str, int, NDArray[np.float64]]]:
    """Of the vectors their length n and the cosine of every pair."""
    for which, vectors in _vectors():
        m, n = vectors.shape
        if m > 1:
            unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            yield which, n, (unit @ unit.T)[np.triu_indices(m, 1)]


def test_no_row_or_column_has_the_numbers_of_another_in_another_order() -> None:
    """Flipped, permuted, scaled, with other signs: independent numbers are never the same ones."""
    seen: dict[bytes, str] = {}
    for which, vectors in _vectors():
        for number, vector in enumerate(vectors if vectors.shape[1] >= 4 else ()):
            here = f"number {number} of the {which}"
            shares = np.sort(np.abs(vector)) / np.linalg.norm(vector)
            # In float32 scaling rounds; of many vectors some have no number near a half.
            assert seen.setdefault(np.round(shares, 5).tobytes(), here) == here, here


def test_rows_and_columns_of_a_weight_lie_as_independent_ones_do() -> None:
    """The mean of n cos^2 over pairs of vectors of n normal numbers is 1, of orthogonal ones 0.

    n cos^2 has a variance of 2 (n - 1) / (n + 2), and of two pairs that share a vector they are
    independent: six standard errors.
    """
    for which, n, cosines in _angles():
        if cosines.size >= 1000:
            mean = n * np.square(cosines).mean()
            told = f"{which}: the mean of n cos^2 is {mean:.3f}, has to be 1"
            assert abs(mean - 1) < 6 * np.sqrt(2 / cosines.size), told


def test_norms_begin_as_one_and_gates_half_open() -> None:
    """A gate is a sigmoid: shut ones would leave almost nothing of what attention adds.

    Its bias and every other one begin as 0.
    """
    for case in built.CASES:
        for name, value in NSALanguageModel(built.config(case)).named_parameters():
            if "norm" in name:
                assert bool((value == 1).all()), name
            elif value.dim() == 1:
                assert bool((value == 0).all()), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_are_kept_in_float32(precision: str, folder: Path) -> None:
    """Whatever the type of products: in bf16 an update below 2^-9 of a weight is lost.

    And are drawn in it: of a type with fewer digits the last 13 bits are 0, by chance of one in
    8,192 weights.
    """
    file = built.write_config("mlp, own head", folder, steps=1, precision=precision)
    plan = plan_launch(["--config", str(file), "--ddp", "0"], built.BATCHED)
    model = Engine(plan, start_ranks(plan, choose_device(plan))).model
    kinds = {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.float32}
    assert not kinds, kinds
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            last_bits = parameter.detach().cpu().view(torch.int32) & (1 << 13) - 1
            rounded = float((last_bits == 0).double().mean())
            assert rounded < 0.01, f"{name} begins in fewer digits than float32 has: {rounded:.0%}"


def test_the_seed_decides_the_weights(folder: Path) -> None:
    """And the config names it: the same one gives the same weights, another one others."""
    first, again, other = (
        built.build("mlp, own head", "batched v2", folder, seed=seed, as_begun=True).model
        for seed in (1, 1, 2)
    )
    alike = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in alike)
    named = zip(first.named_parameters(), other.parameters(), strict=True)
    assert {name for (name, one), two in named if torch.equal(one, two)} == {
        name for name, _ in first.named_parameters() if "norm" in name or name.endswith("bias")
    }


@pytest.mark.parametrize("resume", [(), ("--resume", "before")], ids=("new", "goes on"))
@pytest.mark.parametrize(("words", "steps"), [((), 1000), (("--run-steps", "5000"), 5000)])
def test_a_short_launch_has_the_schedule_of_the_whole_run(
    words: tuple[str, ...], steps: int, resume: tuple[str, ...], folder: Path
) -> None:
    """The rate falls over the steps of the config, or of the run that the launch is a leg of."""
    file = built.write_config("mlp, own head", folder, steps=1000)
    asked = ["--config", str(file), "--steps", "10", *words, *resume]
    assert plan_launch(asked, built.BATCHED).schedule_steps == steps


def test_the_rate_stays_where_the_schedule_ends() -> None:
    """A run that goes on beyond it does not begin to rise again."""
    rates = [
        learning_rate(step, peak=1.0, warmup_steps=10, total_steps=100, shape="cosine")
        for step in (100, 101, 150, 190, 1000)
    ]
    assert rates == pytest.approx([0.1] * 5, rel=1e-12)


@pytest.mark.parametrize(("shape", "share"), [("cosine", 0.55), ("constant", 1.0)])
def test_the_rate_warms_up_whatever_its_shape(shape: str, share: float) -> None:
    """From a tenth of its peak in ten steps; then it is at `share` of it halfway to the end."""
    rates = [
        learning_rate(step, peak=2.0, warmup_steps=10, total_steps=100, shape=shape)
        for step in (1, 5, 10, 55)
    ]
    assert rates == pytest.approx([0.2, 1.0, 2.0, 2.0 * share], rel=1e-12)
