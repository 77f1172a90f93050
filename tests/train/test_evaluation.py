"""An evaluation tells each batch's loss, and computes a drawn batch again by another way."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nsa.contract.digests import drawn_batch
from nsa.step.engine import Engine
from nsa.train.evaluation import evaluate
from nsa.witness.accounts import TokenMeter, batch_digest
from nsa.witness.shadow.recompute import loss_again
from tests.train.engines import S, batch, engine

HELD_OUT = [batch(seed).tokens for seed in (1, 2, 3)]


def test_an_evaluation_is_the_mean_of_its_batches_and_leaves_nothing_behind() -> None:
    trainer = engine()
    found = evaluate(trainer, HELD_OUT, drawn=1)
    assert len(found.losses) == 3
    assert found.loss == pytest.approx(math.fsum(found.losses) / 3, rel=1e-12)
    assert found.kept is HELD_OUT[1]
    assert loss_again(trainer, HELD_OUT[1]) == pytest.approx(found.losses[1], abs=1e-6)
    assert trainer.model.training
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_loss_that_only_an_evaluation_has_is_not_what_the_batch_gives_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Engine.loss

    def loss(self: Engine, tokens: Tensor, *, wrapped: bool = True) -> Tensor:
        whole = real(self, tokens, wrapped=wrapped)
        return whole if torch.is_grad_enabled() else 0.99 * whole

    monkeypatch.setattr(Engine, "loss", loss)
    trainer = engine()
    found = evaluate(trainer, HELD_OUT, drawn=2)
    assert found.kept is not None
    assert loss_again(trainer, found.kept) - found.losses[2] > 0.05


def test_a_batch_that_is_never_reached_is_not_computed_again() -> None:
    assert evaluate(engine(), HELD_OUT[:2], drawn=2).kept is None


def test_what_an_evaluation_reads_is_digested_and_counted_as_it_goes_by() -> None:
    trainer, seen = engine(), []
    meter = TokenMeter(trainer.model)

    def passing() -> Iterator[Tensor]:
        for tokens in meter.passing(HELD_OUT):
            seen.append(tokens)
            yield tokens

    evaluate(trainer, passing(), drawn=0)  # the second time does not count
    assert seen == HELD_OUT
    digest = sum(map(batch_digest, HELD_OUT)) % 2**64
    assert meter.passed() == {"embedded": 3 * 2 * S, "data": f"{digest:016x}"}


def test_the_drawn_batch_differs_by_token_rank_and_step() -> None:
    drawn = {
        drawn_batch(token, rank, step, 64)
        for token in "ab"
        for rank in (0, 1)
        for step in range(20)
    }
    assert drawn <= set(range(64))
    assert len(drawn) > 20
    assert drawn_batch("a", 0, 1, 1) == 0
