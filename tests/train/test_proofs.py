"""The trainer learns what can be learnt, and N ranks compute what one would."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nsa.data.source import CHAIN_CHANCES, chain_entropy_nats
from nsa.train import restore
from tests.shared import once
from tests.train.launching import Launch, run

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="session")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    args = ["--dataset", "markov", "--steps", "250", "--batch-size", "4", "--log-every", "50"]
    return once(tmp_path_factory, "learner", lambda folder: run(folder, args))


def _error_of_the_mean(tokens: int) -> float:
    """Deviation of the mean surprise of the chain's own law over independent tokens."""
    mean = chain_entropy_nats()
    return math.sqrt(sum(p * (-math.log(p) - mean) ** 2 for p in CHAIN_CHANCES) / tokens)


@pytest.mark.slow
def test_learning_proof_the_loss_approaches_the_entropy_rate_from_above(learner: Launch) -> None:
    losses = learner.column("loss")
    assert losses[0] == pytest.approx(math.log(256), abs=0.15)
    assert sum(losses[-20:]) / 20 < chain_entropy_nats() + 0.2
    tokens = 25 * 4 * 128
    for first in range(0, len(losses), 25):
        window = losses[first : first + 25]
        limit = chain_entropy_nats() - 4 * _error_of_the_mean(tokens)
        assert sum(window) / len(window) > limit


@pytest.mark.slow
def test_origin_loss_on_noise_stays_at_ln_vocab(arms: Launch) -> None:
    """The origin's default path saw the future and reached 2.9."""
    losses = arms.column("loss")
    assert sum(losses[-50:]) / 50 > math.log(256) - 0.005
    assert min(losses) > math.log(256) - 0.15


def _gradients(launch: Launch) -> list[torch.Tensor]:
    """After one AdamW step from zero the first moment is (1 - beta1) times the gradient."""
    saved = restore.read(launch.run_dir / "checkpoints" / "step_1")
    return [saved[name] / 0.1 for name in sorted(saved) if name.endswith(".exp_avg")]


def test_ddp_proof_gradients_of_two_ranks_are_those_of_one(one_step: dict[int, Launch]) -> None:
    """Two ranks with two micro-batches each, against one rank with the whole batch at once."""
    assert [launch.process.returncode for launch in one_step.values()] == [0, 0]
    alone, together = _gradients(one_step[1]), _gradients(one_step[2])
    assert len(alone) == len(together) > 10
    for one, two in zip(alone, together, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compared_launches_share_a_digest_and_unlike_ones_do_not(
    one_step: dict[int, Launch], arms: Launch, learner: Launch, tmp_path: Path
) -> None:
    digests = [launch.env()["config_sha256"] for launch in (*one_step.values(), arms, learner)]
    # one_step differs in batch and accumulation; arms has the same accumulation as its second.
    assert len({digests[0], digests[1], digests[3]}) == 3
    assert digests[1] == digests[2]
