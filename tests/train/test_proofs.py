"""The trainer learns what can be learnt, N ranks compute what one would, an end costs no bit."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from nsa.data.source import CHAIN_CHANCES, chain_entropy_nats
from nsa.train import restore
from tests.shared import once
from tests.train.launching import Launch, run, start

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
def test_learning_proof_the_loss_approaches_the_entropy_rate(learner: Launch) -> None:
    losses = learner.column("loss")
    assert losses[0] == pytest.approx(math.log(256), abs=0.15)
    assert sum(losses[-20:]) / 20 < chain_entropy_nats() + 0.2


@pytest.mark.slow
def test_learning_proof_the_loss_never_goes_below_the_entropy_rate(learner: Launch) -> None:
    losses = learner.column("loss")
    per_step = 4 * 128
    for first in range(0, len(losses), 25):
        window = losses[first : first + 25]
        limit = chain_entropy_nats() - 4 * _error_of_the_mean(per_step * len(window))
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


STEPS = 40
ENDS = [(signal.SIGKILL, 19), (signal.SIGKILL, 21), (signal.SIGTERM, 27)]
# What each step has to have had, in the newest run that did it: all but times and memory.
ALIKE = {"training.csv": ["loss", "lr", "grad_norm", "tokens"], "val.csv": ["loss"]}


def begun(out: Path, *, resume: bool = False) -> Launch:
    """A launch by hand that saves and evaluates every second step."""
    settings = ("train.save_every=2", "train.eval_every=2", "train.keep_last=3")
    words = ["--dataset", "markov", "--ddp", "0", "--save", "--seq-len", "32", "--log-every", "500"]
    words += ["--steps", str(STEPS), "--out-dir", str(out)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--resume", str(out / "latest")] if resume else []
    return start(out, words, harness=False)


def runs(out: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    return sorted(out.glob("2*/"))


def tables(out: Path) -> dict[str, pd.DataFrame]:
    found = {}
    for name, columns in ALIKE.items():
        rows = pd.concat([pd.read_csv(path) for path in sorted(out.glob(f"2*/{name}"))])
        last = rows.drop_duplicates("step", keep="last").set_index("step").sort_index()
        found[name] = last[columns].astype(float)
    return found


@pytest.mark.slow
def test_two_kills_and_a_sigterm_change_no_bit(tmp_path: Path) -> None:
    """A run that is ended goes on by `--resume OUT/latest`, and ends as one that was left alone.

    Bit for bit, on the CPU; both runs evaluate and save as they go.
    """
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    straight = begun(whole)
    codes, consoles = [], ""
    for number, (kind, step) in enumerate(ENDS):
        launch = begun(pieces, resume=number > 0)

        def has_come(it: Launch, number: int = number, step: int = step) -> bool:
            """The one before may have done this step too."""
            newest = [replace(it, run_dir=folder) for folder in runs(pieces)[number:]]
            return any(b["step"] >= step for one in newest for b in one.beats(0, "step_end"))

        launch.until(has_come).process.send_signal(kind)
        codes.append(launch.wait().process.returncode)
        consoles += launch.text()
    last = begun(pieces, resume=True).wait()
    consoles += last.text()
    assert [*codes, last.process.returncode] == [-9, -9, 13, 0], consoles
    assert straight.wait().process.returncode == 0, straight.text()
    one, two = tables(whole), tables(pieces)
    for name, wanted in one.items():
        pd.testing.assert_frame_equal(two[name], wanted, check_exact=True)
    assert list(one["training.csv"].index) == list(range(1, STEPS + 1))
    ends = [replace(last, run_dir=folder).exit() for folder in (*runs(whole), *runs(pieces)[2:])]
    assert ends[0]["param_hash"] == ends[2]["param_hash"]
    assert "SIGTERM" in ends[1]["reason"]
    (noted,) = (note for note in replace(last, run_dir=runs(pieces)[-1]).env()["notes"]
                if note.startswith("resumed"))  # fmt: skip
    assert noted.startswith(f"resumed after step {ends[1]['step']} from {runs(pieces)[2]}")
    went_on = re.findall(r"\[resume\] .*\(step (\d+)\)", consoles)
    assert len(went_on) == 3 and went_on[2] == str(ends[1]["step"]), "saved where it was stopped"
    kept = sorted(path.name for path in (whole / "latest/checkpoints").iterdir())
    assert kept == ["step_36", "step_38", "step_40"]
