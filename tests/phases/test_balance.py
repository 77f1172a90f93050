"""The rows that need a second source, and what they are worth: unbalanced numbers do not count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runbook.folder.launch.shapes import ENV, shaped
from runbook.records import Outcome, RankExit
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, env_files, heartbeats, spoil, traces
from tests.phases.answers import (
    DAMAGED,
    FINE,
    NOT_LEARNING,
    NOTHING,
    OTHERWISE,
    TOO_FEW,
    TOO_LITTLE,
    UNBALANCED,
    UNCOLLECTED,
    WARNED,
    WRONG,
    case,
    says,
)
from tests.phases.spoil import at

ROWS = ("accounts", "gradients", "oracle")
CPU = builder.context("cpu")


@pytest.mark.parametrize("name", ["a100x2_pcie4", "h200x1", "cpu"])
@pytest.mark.parametrize("phase", builder.TRAINING)
def test_every_training_phase_requires_them(phase: str, name: str) -> None:
    where = builder.context(name)
    required = set(where.profile.required)
    assert {f"{phase}.{row}" for row in ROWS} <= required or f"{phase}.completed" not in required


def _same_data(made: LaunchEvidence) -> LaunchEvidence:
    return spoil.steps_of(1, data=made.ranks[0].steps["data"])(made)


def _never_alone(made: LaunchEvidence) -> LaunchEvidence:
    return spoil.steps_of(0, alone=False)(spoil.steps_of(1, alone=False)(made))


def _faster(made: LaunchEvidence) -> LaunchEvidence:
    """The trainer writes half of each step's time; its heartbeats keep the clock's."""
    kept = made.ranks
    return at("ranks", tuple(map(replace, kept)))(spoil.slower(0.5)(made))


def _in_force(name: str, value: Any) -> spoil.Change:
    return at(f"ranks.1.ending.in_force.{name}", value)


def _every_other(made: LaunchEvidence) -> LaunchEvidence:
    return spoil.rank(0, checkpoints=made.ranks[0].checkpoints[1::2])(made)


# An hour ago by every rank's clock; while it ran, training.csv lacked rows that rank 0 had told of.
BEHIND = spoil.result(ranks=[RankExit(rank=rank, code=0, wall_gap_s=3600.1) for rank in (0, 1)])
IN_MEMORY = spoil.result(ranks=(RankExit(rank=0, code=0, late_rows={"training.csv": 57}),))
GIVEN = "a setting that it was given"


def _large(made: LaunchEvidence) -> LaunchEvidence:
    """Weights of rank 1 that begin ten times too large."""
    weights = made.ranks[1].proof["weights"]
    down = {**weights["mlp.down"], "rms": [10 * rms for rms in weights["mlp.down"]["rms"]]}
    return at("ranks.1.proof.weights", {**weights, "mlp.down": down})(made)


@pytest.mark.parametrize("holds", [
    case("baseline", "accounts", IN_MEMORY, UNBALANCED, "training.csv was up to 57 steps behind"),
    case("baseline", "accounts", BEHIND, UNBALANCED, "(ts) that are 3600.1 s behind the clock"),
    case("baseline", "accounts", _same_data, UNBALANCED, "ranks 0 and 1 read the same data",
         remedy="follow a batch from its source to the model"),
    case("baseline", "accounts", _faster, UNBALANCED, "dt_s sums to 0.500"),
    case("baseline", "accounts", spoil.effective(n_params=78_404_784 + 256 * 768), UNBALANCED,
         "env.json counts 78601392 parameters, a model of its config has 78404784"),
    case("baseline", "accounts", _in_force("threads", 4), WRONG,
         "rank 1 computes with 4 threads, OMP_NUM_THREADS=1", remedy=GIVEN),
    case("baseline", "accounts", _never_alone, TOO_FEW, "has a dump, an evaluation or a save",
         remedy="evaluate, save and dump less often"),
    case("baseline", "accounts", at("training.frame", lambda table: table.assign(lr=3e-4)),
         UNBALANCED, "lr of step 1 is 0.0003", remedy="what counts the steps of the schedule"),
    # Another selection than the config means, in every phase that reads it.
    case("baseline", "accounts", at("gates", traces.gates(60).assign(sel_blocks_mean=2.5)), WRONG,
         "a query attends to 2.5 blocks, where n_sel=", remedy="statistics are wrong"),
    case("long_run", "accounts", _every_other, UNBALANCED, "no checkpoint of step 60, 180",
         remedy="look at the condition under which the trainer begins a save", where=CPU,
         only=("run",)),
    case("baseline", "gradients", at("ranks.1.proof.mean_high", 0.5), NOT_LEARNING,
         "the mean of known gradients came out as", remedy="look at how the trainer wraps the"),
    case("baseline", "gradients",
         spoil.every_rank(ending={"moved": {"norm": 0.0}, "largest_lr": 0.0}), NOT_LEARNING,
         "did not move: norm"),
    case("baseline", "gradients", at("ranks.1.ending.shadow", left=640, jumps=3), NOT_LEARNING,
         "640 of the elements watched", remedy="clear the gradients after every update"),
    case("baseline", "gradients", at("ranks.1.ending.updates", [198, 198]), NOT_LEARNING,
         remedy="look at what skips or repeats it", called="updates"),
    case("baseline", "gradients", at("ranks.1.ending.proof.logit_gradient", 0.5), NOT_LEARNING,
         remedy="divided by train.accumulate_grad_batches", called="logits"),
    case("baseline", "gradients", at("ranks.1.ending.shadow.second_moment", 1e6), NOT_LEARNING,
         remedy="at betas and epsilon", called="second moment"),
    case("baseline", "oracle", at("ranks.0.proof.oracle", {**heartbeats.SPOTS, "attention": 0.5}),
         UNBALANCED, "attention is off by 0.5"),
    case("baseline", "oracle", _large, WRONG,
         "rank 1: mlp.down begins with a deviation of 0.04082, has to be 0.004082",
         remedy="look at how the trainer draws its weights", where=CPU),
    case("baseline", "oracle", None, FINE, "the weights of 16 groups begin as they have to",
         where=CPU),
    *(case("baseline", row, at("ranks", lambda ranks: ranks[:1]), NOTHING, called=f"{row}-alone")
      for row in ROWS),
    *(case("baseline", row, spoil.parts(env={"world_size": 2}), DAMAGED, called=f"{row}-workload")
      for row in ROWS),
])  # fmt: skip
def test_a_launch_that_does_not_balance_fails(holds: Callable[[], None]) -> None:
    holds()


@pytest.mark.parametrize(
    ("share", "rate", "wanted"),
    [(0.0, 39.3, FINE), (-0.015, 39.3, FINE), (0.015, 39.3, TOO_LITTLE), (0.03, 39.3, UNBALANCED)],
)
def test_the_slower_clock_decides(share: float, rate: float, wanted: Any) -> None:
    """39.3 tok/s by dt_s reach the floor of 39; 1.5 % longer by a rank's clock they do not."""
    later = spoil.steps_of(1, mono=lambda steps: 1000.0 + (steps["mono"] - 1000.0) * (1 + share))
    check = says(answers.row("baseline", "throughput", later, rate=rate), wanted)
    if share < 0.03:
        assert check.measurement.value == pytest.approx(rate / (1 + max(share, 0.0)), rel=1e-4)
        assert any("heartbeat_rank1" in path for path in check.evidence) is (share > 0)


AGREES = {"agrees": True, "refused": None, "problems": []}
DISAGREES = {"agrees": False, "refused": None, "problems": ["k_win is off by 0.2 of itself"]}
REFUSED = {"agrees": False, "refused": "no kernel", "problems": ["it could not run: no kernel"]}
OURS = {"value": "sdpa", "reason": "triton was rejected"}


def _tested(selected: Any = None, **paths: dict[str, Any]) -> spoil.Change:
    """The trainer tested its kernels, with these results, and trained with the last of them."""
    window = {"value": list(paths)[-1], "reason": "as it came out"}
    new = {"window": window, **({"selected": selected} if selected else {})}
    return spoil.both(at("env.attention.self_test.paths", paths), at("env.attention", **new))


def _not_tested(**told: Any) -> spoil.Change:
    """On the last launch only, these words of its self-test are others."""
    return spoil.of_launch("run5", at("env.attention.self_test", **told))


def oracle(change: spoil.Change, wanted: Any, *words: str, remedy: str = "", **where: Any) -> Any:
    return case("baseline", "oracle", change, wanted, *words, remedy=remedy, **where)


# In every launch, though the trainer went on without the kernel.
@pytest.mark.parametrize("holds", [
    oracle(_tested(varlen=AGREES), FINE, "the self-test agrees with varlen"),
    oracle(_tested(varlen=DISAGREES, masked=AGREES), WRONG,
           "rejected varlen: k_win is off by 0.2 of itself; masked ran instead",
           remedy="NSA_USE_TRITON_SEL=0", evidence="env.json"),
    oracle(_tested(varlen=REFUSED, masked=AGREES), WARNED,
           "rejected varlen: it could not run: no kernel; masked ran instead"),
    oracle(_tested(varlen=REFUSED, masked=DISAGREES), WRONG, "k_win"),
    oracle(_tested(varlen={**DISAGREES, "agrees": True}), WRONG, "k_win is off"),
    oracle(_tested(OURS, triton=DISAGREES, varlen=AGREES), WRONG, "varlen and sdpa ran instead",
           "rejected triton", remedy="NSA_USE_TRITON_SEL=0"),
    oracle(_not_tested(ran=False, reason="NSA_SELF_TEST=off", paths={}), UNCOLLECTED,
           "no self-test on the GPU (NSA_SELF_TEST=off)", "run5", remedy="NSA_SELF_TEST"),
    oracle(spoil.of_launch("run5", at("env.attention.self_test", None)), UNCOLLECTED,
           "no self-test on the GPU (env.json tells of none)"),
    oracle(_not_tested(paths={"masked": AGREES}), UNCOLLECTED, "tells nothing of varlen, which"),
    oracle(_not_tested(paths={}), UNCOLLECTED, "tells nothing of varlen, which ran"),
    oracle(spoil.both(_not_tested(paths={"varlen": AGREES}),
                      at("env.attention.selected", {"value": "triton", "reason": "asked for"})),
           UNCOLLECTED, "tells nothing of triton, which ran"),
    oracle(_not_tested(seq_len=128), UNCOLLECTED,
           "was of S=128, bfloat16; trained was S=2048, bfloat16"),
    oracle(_not_tested(dtype="float32"), UNCOLLECTED, "was of S=2048, float32; trained"),
])  # fmt: skip
def test_what_the_self_test_of_the_kernels_said_is_seen(holds: Callable[[], None]) -> None:
    holds()


def test_a_damaged_result_does_not_hide_the_kernel_that_failed() -> None:
    attention = {"self_test": {"ran": True, "paths": {"varlen": DISAGREES, "masked": 5}}}

    def change(made: LaunchEvidence) -> LaunchEvidence:
        kept, problems = shaped({**made.env, "attention": attention}, ENV, "env.json")
        return spoil.parts(env=kept, problems=(*made.problems, *problems))(made)

    says(answers.row("baseline", "oracle", change), DAMAGED, "env.json.attention.self_test.paths")


def _learns(change: spoil.Change, wanted: Any, *words: str, **scale: Any) -> Any:
    return case("long_run", "learns", change, wanted, *words, where=builder.context(**scale))


STUCK = spoil.columns(loss=lambda t: env_files.FLOOR + 0.01 * np.sin(t["step"]))
NOISE = spoil.effective(dataset="synthetic", loss_floor=env_files.FLOOR)
BEFORE = {"baseline": builder.evidence("baseline", builder.context())}
LOST = {"baseline": builder.evidence("baseline", builder.context(), change=spoil.without_rank_1)}


def _same(change: spoil.Change | None, wanted: Any, *words: str, earlier: Any = BEFORE) -> Any:
    return case("single_gpu", "same_as_baseline", change, wanted, *words, earlier=earlier)


@pytest.mark.parametrize("holds", [
    # A loss that stays where it began; noise teaches nothing, however low its loss.
    _learns(STUCK, NOT_LEARNING),
    _learns(STUCK, TOO_FEW, steps_scale=0.1),
    _learns(NOISE, OTHERWISE),
    # One rank must read what all ranks read together.
    _same(None, FINE),
    _same(spoil.steps_of(0, data="1"), UNBALANCED, "read other data"),
    _same(spoil.steps_of(0, data="f" * 16), UNBALANCED, "read other data"),
    _same(spoil.columns(loss=lambda t: t["loss"] + 0.1), UNBALANCED, "the first loss of all ranks"),
    _same(None, NOTHING, "baseline/run1/heartbeat_rank1.jsonl", earlier=LOST),
])  # fmt: skip
def test_what_was_learned_and_from_which_data(holds: Callable[[], None]) -> None:
    holds()


def test_what_was_learned_is_held_against_the_limit_with_four_standard_errors() -> None:
    losses = spoil.columns(loss=lambda t: 3.0 + 0.5 * np.sign(np.sin(math.pi * (t["step"] - 0.5))))
    check = answers.row("long_run", "learns", losses)
    # The last 50 steps are 2.5 and 3.5 in turn: mean 3, standard error 0.5 / sqrt(50).
    worst = 3.0 + 4 * 0.5 / math.sqrt(50)
    share = (env_files.FLOOR - worst) / (env_files.FLOOR - env_files.ENTROPY)
    assert check.measurement.value == pytest.approx(share)
    assert (check.outcome, check.limit) == (Outcome.PASS, 0.1)
