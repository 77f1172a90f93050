"""A profile may name another trainer: every training launch starts it, and nothing else changes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from runbook.config import registry
from tests.phases import builder

PHASES = registry.phases()


def test_every_training_launch_starts_the_trainer_of_the_profile() -> None:
    ours = builder.context("cpu")
    theirs = builder.with_profile(ours, trainer="their.trainer")
    started = 0
    for phase in PHASES.values():
        for before, after in zip(phase.plan(ours), phase.plan(theirs), strict=True):
            if before.kind != "trainer":
                assert before == after
                continue
            swapped = [word.replace("nsa.train", "their.trainer") for word in before.argv]
            assert list(after.argv) == swapped != list(before.argv)
            started += 1
    assert started >= 9


@pytest.mark.parametrize("name", ["", "a b", "--help", "x;y", "../t", "1a", "a..b", "a."])
def test_a_trainer_that_is_no_module_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="trainer"):
        builder.with_profile(builder.context("cpu"), trainer=name)
