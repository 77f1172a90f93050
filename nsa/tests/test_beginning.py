"""What a launch begins with: the model's shape, its first weights, and the schedule of its rate.

Weights are held against the distributions that docs/trainer-contract.md, "First weights", names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from numpy.typing import NDArray

from nsa.config import ModelConfig
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import choose_device, start_ranks
from nsa.model import NSALanguageModel
from nsa.settings import TrainSection
from nsa.step.engine import Engine
from nsa.step.numbers import learning_rate
from nsa.tests import built

pytestmark = [pytest.mark.topic("first_weights"), pytest.mark.usefixtures("settings_of_torch")]
settings_of_torch = built.settings_of_torch


@pytest.mark.topic("shape")
@pytest.mark.parametrize("case", list(built.CASES))
def test_the_model_has_the_shape_that_its_config_says(case: str, tmp_path: Path) -> None:
    """A value that is lost on the way is the trainer's own, which no other test would tell."""
    found, wanted = built.build(case, "batched v2", tmp_path).model, built.config(case)
    assert all(layer.cfg == wanted.attention for layer in built.attentions(found))
    shapes = [
        {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for model in (found, NSALanguageModel(wanted))
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.topic("seed")
def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    """And the config names it: the same one gives the same weights, another one others."""
    first, again, other = (
        built.build("mlp, own head", "batched v2", tmp_path, seed=seed, as_begun=True).model
        for seed in (1, 1, 2)
    )
    alike = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in alike)
    named = zip(first.named_parameters(), other.parameters(), strict=True)
    assert {name for (name, one), two in named if torch.equal(one, two)} == {
        name for name, _ in first.named_parameters() if "norm" in name or name.endswith("bias")
    }


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
    size = scipy.fft.next_fast_len(2 * whole.size, real=True)
    spectrum = scipy.fft.rfft(whole.astype(np.float32), size)
    products = scipy.fft.irfft(np.abs(spectrum) ** 2, size)[1 : whole.size]
    most = np.sqrt(2 * whole.size * np.log(2e9 * whole.size))
    assert np.abs(products).max() < most, "some weights are parts of the numbers of others"


def test_no_two_rows_or_columns_of_a_weight_begin_alike() -> None:
    """Twins get equal gradients and stay twins: half of the units would be trained for nothing.

    By the share of a sphere within an angle of a direction: of m vectors of n normal numbers two
    are closer than this, up to their sign, with a chance of 1e-9. The mean of n cos^2 over pairs is
    1, of orthogonal ones 0; its variance is 2 (n - 1) / (n + 2), and two pairs that share a vector
    are independent: six standard errors. Flipped, permuted, scaled, with other signs, independent
    numbers are never the same ones.
    """
    seen: dict[bytes, str] = {}
    for which, vectors in _vectors():
        m, n = vectors.shape
        if n < 4 or m < 2:
            continue
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = (unit @ unit.T)[np.triu_indices(m, 1)]
        nearest = np.sqrt(1 - (1e-9 / cosines.size) ** (2 / (n - 1)))
        assert np.abs(cosines).max() < nearest, f"two {which}"
        # In float32 scaling rounds; of many vectors some have no number near a half.
        for number, shares in enumerate(np.round(np.sort(np.abs(unit)), 5)):
            here = f"number {number} of the {which}"
            assert seen.setdefault(shares.tobytes(), here) == here, here
        mean, spread = n * np.square(cosines).mean(), 6 * np.sqrt(2 / cosines.size)
        told = f"{which}: the mean of n cos^2 is {mean:.3f}, has to be 1"
        assert cosines.size < 1000 or abs(mean - 1) < spread, told


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
def test_weights_are_kept_in_float32(precision: str, tmp_path: Path) -> None:
    """Whatever the type of products: in bf16 an update below 2^-9 of a weight is lost.

    And are drawn in it: of a type with fewer digits the last 13 bits are 0, by chance of one in
    8,192 weights.
    """
    file = built.write_config("mlp, own head", tmp_path, steps=1, precision=precision)
    plan = plan_launch(["--config", str(file), "--ddp", "0"], built.BATCHED)
    model = Engine(plan, start_ranks(plan, choose_device(plan))).model
    kinds = {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.float32}
    assert not kinds, kinds
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            last_bits = parameter.detach().cpu().view(torch.int32) & (1 << 13) - 1
            rounded = float((last_bits == 0).double().mean())
            assert rounded < 0.01, f"{name} begins in fewer digits than float32 has: {rounded:.0%}"


@pytest.mark.topic("schedule")
@pytest.mark.parametrize("resume", [(), ("--resume", "before")], ids=("new", "goes on"))
@pytest.mark.parametrize(("words", "steps"), [((), 1000), (("--run-steps", "5000"), 5000)])
def test_a_short_launch_has_the_schedule_of_the_whole_run(
    words: tuple[str, ...], steps: int, resume: tuple[str, ...], tmp_path: Path
) -> None:
    """The rate falls over the steps of the config, or of the run that the launch is a leg of."""
    file = built.write_config("mlp, own head", tmp_path, steps=1000)
    asked = ["--config", str(file), "--steps", "10", *words, *resume]
    assert plan_launch(asked, built.BATCHED).schedule_steps == steps


@pytest.mark.topic("schedule")
def test_the_rate_stays_where_the_schedule_ends() -> None:
    """A run that goes on beyond it does not begin to rise again."""
    train = TrainSection(steps=100, seq_len=2, batch_size=1, lr=1.0, warmup_steps=10)
    rates = [learning_rate(step, train, total_steps=100) for step in (100, 101, 150, 190, 1000)]
    assert rates == pytest.approx([0.1] * 5, rel=1e-12)


@pytest.mark.topic("schedule")
@pytest.mark.parametrize("peak", [2.0, 3e-6])
@pytest.mark.parametrize("shape", ["cosine", "constant"])
def test_the_rate_warms_up_and_then_follows_its_shape(shape: Any, peak: float) -> None:
    """A straight line in ten steps, then half a turn of a point on a circle, or none."""
    shares = [step / 10 for step in range(1, 11)]
    turns = np.exp(1j * np.pi * np.arange(1, 91) / 90)
    height = (1 + turns.real) / 2 if shape == "cosine" else np.ones(90)
    shares += list(0.1 + 0.9 * height if shape == "cosine" else height)
    train = TrainSection(
        steps=100, seq_len=2, batch_size=1, lr=peak, lr_schedule=shape, warmup_steps=10
    )
    rates = [learning_rate(step, train, total_steps=100) for step in range(1, 101)]
    assert np.divide(rates, peak) == pytest.approx(shares, rel=1e-12)
