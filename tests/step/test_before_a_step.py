"""Before a step: what a kernel lacks is said, and numbers that our modules do not give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.attention.tracing import OperatorCount, count_ranges
from nsa.launch.asked import why_not
from nsa.model import Layer, NSALanguageModel, mean_loss, whole
from nsa.rounding import FLOAT32_SUMS, widest
from nsa.step.compiled import compare
from nsa.toggles import parse_toggles
from tests.factory.tables import table
from tests.step.small import model_of, tokens_of
from tests.step.test_cuda_graphs import scaled


def _no_rotation(layer: Layer, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    still = torch.stack((torch.ones_like(turns[..., 0]), torch.zeros_like(turns[..., 0])), -1)
    return whole(layer, x, still)


def _other_choice(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of one query in fifty; what it gives is not looked at."""
    out, gates, blocks = whole(*given)
    changed = blocks.clone()
    changed[:, ::50] = -1
    return out, gates, changed


Defect = tuple[Callable[..., Any], Callable[..., Tensor], str]
DEFECTS: dict[str, Defect] = {
    "none": (whole, mean_loss, ""),
    "no rotation": (_no_rotation, mean_loss, "layer"),
    "wrong gradient": (scaled(whole, 1.001), mean_loss, "layer"),
    "other blocks": (_other_choice, mean_loss, "layer"),
    "sum for mean": (whole, lambda z, t: mean_loss(z, t) * t.numel(), "loss"),
    "not finite": (whole, lambda z, t: mean_loss(z, t) * torch.nan, "loss"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_other_numbers_are_noticed_before_a_step(defect: str) -> None:
    model = model_of()
    model.compiled, loss, part = DEFECTS[defect]
    random = torch.get_rng_state()
    gaps = compare(model, loss, tokens=(2, 50), autocast=nullcontext)
    assert {gap.what.split(",")[0] for gap in gaps if gap.too_wide} == ({part} if part else set())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_bound_is_twice_our_own_error() -> None:
    ours = {"a": 1e-3, "b": 1e-3, "exact": 0.0}
    assert not widest({"a": 2e-3, "exact": FLOAT32_SUMS}, ours).too_wide
    assert widest({"a": 2.1e-3, "exact": 0.0}, ours).too_wide
    # Wherever it stands among others: no comparison with it is true.
    for errors in ({"a": float("nan"), "b": 3e-3}, {"b": 3e-3, "a": float("nan")}):
        found = widest(errors, ours, of="layer, ")
        assert found.too_wide and found.what == "layer, a"


@table(__file__, "missing")
def test_what_is_missing_is_said_before_it_is_needed(
    asked: dict[str, str], device: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.launch.asked.importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("nsa.launch.asked.shutil.which", lambda _: None)
    found = why_not(parse_toggles(asked), device)
    assert (found is None) == (words is None)
    assert words is None or (found is not None and words in found)


class TestWhatIsWatched:
    @pytest.fixture
    def model(self) -> NSALanguageModel:
        found = model_of()
        self.ran = 0

        def noting(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
            self.ran += 1
            return whole(*args)

        found.compiled = noting
        return found

    def ran_in(self, model: NSALanguageModel) -> int:
        before = self.ran
        model(tokens_of()[:, :-1])
        return self.ran - before

    @pytest.mark.parametrize("of", ["layers.1.attention", "layers.0.mlp.down"])
    def test_a_hook_inside_of_a_layer_is_called(self, model: NSALanguageModel, of: str) -> None:
        seen: list[Any] = []
        handle = model.get_submodule(of).register_forward_hook(lambda *_: seen.append(1))
        assert self.ran_in(model) == 0 and len(seen) == 1
        handle.remove()
        assert self.ran_in(model) == 2

    def test_counts_and_modes(self, model: NSALanguageModel) -> None:
        with count_ranges() as counts:
            assert self.ran_in(model) == 0
        assert counts.entered
        with OperatorCount():
            assert self.ran_in(model) == 0

    def test_a_plain_pass_is_compiled_unless_it_is_wanted_from_the_host(
        self, model: NSALanguageModel
    ) -> None:
        model.run_from_host(2)
        assert [self.ran_in(model) for _ in range(3)] == [0, 0, 2]
        assert self.ran_in(model.eval()) == 2

    def test_recomputation_goes_the_way_that_the_pass_went(self) -> None:
        """A count ends before the backward pass: another way would save other tensors."""
        model = model_of(gradient_checkpointing=True)
        ran: list[bool] = []
        model.compiled = lambda *args: (ran.append(True), whole(*args))[1]  # type: ignore[func-returns-value]
        with count_ranges():
            loss = model(tokens_of()).sum()
        loss.backward()
        assert not ran
        model(tokens_of()).sum().backward()
        assert len(ran) == 4
