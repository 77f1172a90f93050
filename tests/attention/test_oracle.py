"""The NumPy model by itself: at the production shape, in a launch's types, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nsa
from nsa.config import ModelConfig
from nsa.contract import NSAError
from nsa.layer import NSAAttention
from nsa.model import NSALanguageModel
from nsa.witness import oracle

SEQ_LEN = 2048
POSITIONS = np.linspace(0, SEQ_LEN - 1, 9).astype(int)
# Of the output's length: rounding by 2**-24 and 2**-9, through a few sums.
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}


def parts(layer: NSAAttention) -> dict[str, oracle.Array]:
    return {n: p.detach().double().numpy() for n, p in layer.state_dict().items()}


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Length of the difference over length, of the worst position."""
    off = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(off.max())


def first_layer(precision: str, phi: str) -> tuple[NSAAttention, torch.Tensor, torch.Tensor]:
    """A production layer as it begins, its input [1,S,dim] and its output, like in training."""
    torch.manual_seed(3)
    shape = nsa.NSAConfig(phi=phi)
    model = NSALanguageModel(ModelConfig(vocab_size=256, n_layers=1, attention=shape))
    layer, seen = model.layers[0].attention, []
    layer.register_forward_hook(lambda _, inputs, out: seen.extend((*inputs, out)))
    on = precision == "bf16"
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        model(torch.randint(0, 256, (1, SEQ_LEN)))
    return layer, seen[0], seen[1]


@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("precision", list(BOUNDS))
def test_a_slice_at_the_real_shape(precision: str, phi: str) -> None:
    layer, x, out = first_layer(precision, phi)
    blocks = layer.last_blocks[:, POSITIONS].numpy()
    found = oracle.attention(
        layer.cfg, parts(layer), x.double().numpy(), positions=POSITIONS, blocks=blocks
    )
    mine = out[:, POSITIONS].double().numpy()
    assert relative(mine, found.out) <= BOUNDS[precision]
    selection = oracle.judge_selection(layer.cfg, found, blocks)
    assert (selection.rows, selection.illegal) == (18, 0) and selection.shortfall <= BOUNDS[
        precision
    ]
    # Even as a model begins, each branch is far more of the output than any rounding is.
    weight = layer.out_proj.weight.detach().double().numpy()
    for i, name in enumerate(oracle.BRANCHES):
        share = (found.gates[..., i, None] * found.branches[name]).reshape(1, len(POSITIONS), -1)
        assert relative(found.out - share @ weight.T, found.out) > 5 * BOUNDS[precision], name


def test_narrow_weights_are_refused() -> None:
    """One line for each: the answer would only look like float64."""
    layer = NSAAttention(nsa.NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4))
    narrow = {n: p.astype(np.float32) for n, p in parts(layer).items()}
    with pytest.raises(NSAError, match=r"3 problem\(s\)") as error:
        oracle.attention(layer.cfg, narrow, np.zeros((1, 5, 8)))
    assert "in_proj.weight: float32, must be float64" in str(error.value)


# Position 59 of blocks of 10 sees blocks 0 to 5; forced are 0, 4 and 5, two more are free.
SMALL = nsa.NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, l=10, d=5, l_sel=10, n_sel=5)
SCORES = np.array([9.0, 2.0, 1.0, 3.0, 0.0, 0.0])


def judged(*blocks: int, scores: np.ndarray = SCORES) -> oracle.Selection:
    empty = np.zeros((1, 1, 2, 3))
    found = oracle.Attended(
        positions=np.array([59]),
        out=empty,
        branches={},
        gates=empty,
        scores=scores[None, None, None],
        chosen=np.zeros((1, 1, 1, 6), dtype=bool),
    )
    return oracle.judge_selection(SMALL, found, np.array(blocks)[None, None, None])


@pytest.mark.parametrize(
    ("blocks", "illegal", "differing", "shortfall"),
    [
        ((0, 1, 3, 4, 5), 0, 0, -1.0),
        ((5, 3, 0, 4, 1), 0, 0, -1.0),
        ((0, 2, 3, 4, 5), 0, 1, 1.0),
        ((0, 1, 2, 4, 5), 0, 1, 2.0),
        ((0, 1, 3, 5, 2), 1, 0, -np.inf),
        ((1, 2, 3, 4, 5), 1, 0, -np.inf),
        ((0, 1, 4, 5, 6), 1, 0, -np.inf),
        ((0, 1, 4, 5, -1), 1, 0, -np.inf),
        ((0, 1, 4, 5, 5), 1, 0, -np.inf),
    ],
    ids=["best", "order", "worse", "worst", "local", "initial", "ahead", "few", "twice"],
)
def test_a_selection_is_judged(
    blocks: tuple[int, ...], illegal: int, differing: int, shortfall: float
) -> None:
    found = judged(*blocks)
    assert (found.illegal, found.differing, found.shortfall) == (illegal, differing, shortfall)


def test_a_tie_within_rounding_is_small() -> None:
    """The other block of a near tie differs, by as little as the scores do."""
    near = SCORES + np.array([0, 0, 1 - 1e-9, 0, 0, 0])
    found = judged(0, 2, 3, 4, 5, scores=near)
    assert found.differing == 1 and found.illegal == 0 and 0 < found.shortfall < 1e-8
