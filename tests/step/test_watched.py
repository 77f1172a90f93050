"""What is watched by hooks, counts and modes runs as modules: they see nothing of a graph."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from nsa.attention.tracing import OperatorCount, count_ranges
from nsa.model import NSALanguageModel, whole
from tests.step.small import model_of, tokens_of


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

    def test_a_plain_pass_is_compiled(self, model: NSALanguageModel) -> None:
        assert self.ran_in(model) == 2
        assert self.ran_in(model.eval()) == 2

    @pytest.mark.parametrize("of", ["layers.1.attention", "layers.0.mlp.down"])
    def test_a_hook_inside_of_a_layer_is_called(self, model: NSALanguageModel, of: str) -> None:
        seen: list[Any] = []
        handle = model.get_submodule(of).register_forward_hook(lambda *_: seen.append(1))
        assert self.ran_in(model) == 0 and len(seen) == 1
        handle.remove()
        assert self.ran_in(model) == 2
        back = model.get_submodule(of).register_full_backward_hook(lambda *_: None)
        assert self.ran_in(model) == 0
        back.remove()

    def test_a_layers_own_hook_is_called_either_way(self, model: NSALanguageModel) -> None:
        seen: list[Any] = []
        model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        assert self.ran_in(model) == 2 and len(seen) == 1

    def test_counts_and_modes(self, model: NSALanguageModel) -> None:
        with count_ranges() as counts:
            assert self.ran_in(model) == 0
        assert counts.entered
        with OperatorCount():
            assert self.ran_in(model) == 0

    def test_a_pass_that_is_wanted_from_the_host(self, model: NSALanguageModel) -> None:
        model.run_from_host(2)
        assert [self.ran_in(model) for _ in range(3)] == [0, 0, 2]

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
