"""The rows that need a second source, and what they are worth: unbalanced numbers do not count."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.folder.launch.shapes import ENV, shaped
from runbook.records import Outcome, RankExit, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, env_files, heartbeats, spoil, traces
from tests.phases.answers import (
    DAMAGED,
    NOT_LEARNING,
    NOTHING,
    OTHERWISE,
    TOO_FEW,
    UNBALANCED,
    UNCOLLECTED,
    WRONG,
    says,
)

ROWS = ("accounts", "gradients", "oracle")


@pytest.mark.parametrize("name", ["a100x2_pcie4", "h200x1", "cpu"])
@pytest.mark.parametrize("phase", builder.TRAINING)
def test_every_training_phase_requires_them(phase: str, name: str) -> None:
    where = builder.context(name)
    required = set(where.profile.required)
    assert {f"{phase}.{row}" for row in ROWS} <= required or f"{phase}.completed" not in required


def _proof(made: LaunchEvidence, number: int, **values: Any) -> LaunchEvidence:
    proof = {**(made.ranks[number].proof or {}), **values}
    return spoil.rank(number, proof=proof)(made)


def _same_data(made: LaunchEvidence) -> LaunchEvidence:
    first, second = made.ranks[0].steps, made.ranks[1].steps
    return spoil.rank(1, steps=second.assign(data=first["data"]))(made)


def _faster(made: LaunchEvidence) -> LaunchEvidence:
    """The trainer writes half of each step's time; its heartbeats keep the clock's."""
    table = made.training.frame.assign(
        dt_s=lambda t: t["dt_s"] / 2, toks_per_s=lambda t: t["toks_per_s"] * 2
    )
    ranks = made.ranks
    return replace(
        made, training=replace(made.training, frame=table), ranks=tuple(replace(r) for r in ranks)
    )


def _an_hour_behind(made: LaunchEvidence) -> LaunchEvidence:
    """Every rank writes the time of an hour ago; its steps take as long as they say."""
    exits = tuple(RankExit(rank=log.rank, code=0, wall_gap_s=3600.1) for log in made.ranks)
    return spoil.result(ranks=exits)(made)


# While it ran, training.csv lacked rows that rank 0 had told of.
_rows_in_memory = spoil.result(ranks=(RankExit(rank=0, code=0, late_rows={"training.csv": 57}),))


def _in_force(made: LaunchEvidence, **values: Any) -> LaunchEvidence:
    """Rank 1 runs with other settings than it was given."""
    ending = made.ranks[1].ending
    told = {**ending["in_force"], **values}
    return spoil.rank(1, ending={**ending, "in_force": told})(made)


SPOILED = [
    ("accounts", _rows_in_memory, Reason.UNBALANCED, "training.csv was up to 57 steps behind"),
    ("accounts", _an_hour_behind, Reason.UNBALANCED, "(ts) that are 3600.1 s behind the clock"),
    ("accounts", _same_data, Reason.UNBALANCED, "ranks 0 and 1 read the same data"),
    ("accounts", _faster, Reason.UNBALANCED, "dt_s sums to 0.500"),
    (
        "accounts",
        spoil.effective(n_params=78_404_784 + 256 * 768),
        Reason.UNBALANCED,
        "env.json counts 78601392 parameters, a model of its config has 78404784",
    ),
    (
        "accounts",
        lambda made: _in_force(made, threads=4),
        Reason.MISMATCH,
        "rank 1 computes with 4 threads, OMP_NUM_THREADS=1",
    ),
    (
        "gradients",
        lambda made: _proof(made, 1, mean_high=0.5),
        Reason.NOT_LEARNING,
        "the mean of known gradients came out as",
    ),
    (
        "gradients",
        spoil.every_rank(ending={"moved": {"norm": 0.0}, "largest_lr": 0.0}),
        Reason.NOT_LEARNING,
        "did not move: norm",
    ),
    (
        "oracle",
        lambda made: _proof(made, 0, oracle={**heartbeats.SPOTS, "attention": 0.5}),
        Reason.UNBALANCED,
        "attention is off by 0.5",
    ),
]


@pytest.mark.parametrize(
    ("what", "change", "code", "text"), SPOILED, ids=[entry[3][:24] for entry in SPOILED]
)
def test_a_launch_that_does_not_balance_fails(
    what: str, change: spoil.Change, code: Reason, text: str
) -> None:
    check = answers.row("baseline", what, change)
    assert check.outcome is Outcome.FAIL
    assert check.code is code
    assert text in check.reason
    assert check.remedy
    assert ("a setting that it was given" in check.remedy) is (code is Reason.MISMATCH)


def _slower_by(share: float) -> spoil.Change:
    """The clock of rank 1 shows that every step took so much longer than the CSV says."""
    return spoil.steps_of(1, mono=lambda steps: 1000.0 + (steps["mono"] - 1000.0) * (1 + share))


def test_the_slower_clock_decides() -> None:
    """39.3 tok/s by dt_s reach the floor of 39; 1.5 % longer by a rank's clock they do not."""
    where = builder.context()
    for share, outcome in ((0.0, Outcome.PASS), (0.015, Outcome.FAIL), (-0.015, Outcome.PASS)):
        found = builder.evidence("baseline", where, rate=39.3, change=_slower_by(share))
        check = builder.row("baseline", "throughput", found, where)
        assert check.outcome is outcome, check.reason
        slower = 1 + max(share, 0.0)
        assert check.measurement.value == pytest.approx(39.3 / slower, rel=1e-4)
        heard = any("heartbeat_rank1" in path for path in check.evidence)
        assert heard is (share > 0)
    check = answers.row("baseline", "throughput", _slower_by(0.03), where, rate=39.3)
    assert check.outcome is Outcome.FAIL and check.code is Reason.UNBALANCED


@pytest.mark.parametrize("what", ROWS)
def test_a_rank_without_heartbeats_balances_nothing(what: str) -> None:
    where = builder.context()

    def lost(made: LaunchEvidence) -> LaunchEvidence:
        return replace(made, ranks=made.ranks[:1])

    spoiled = builder.evidence("baseline", where, change=lost)
    says(builder.row("baseline", what, spoiled, where), NOTHING)


@pytest.mark.parametrize("what", ROWS)
def test_an_env_json_that_does_not_say_the_workload_is_damaged(what: str) -> None:
    says(answers.row("baseline", what, spoil.parts(env={"world_size": 2})), DAMAGED)


def _self_tested(**paths: dict[str, Any]) -> spoil.Change:
    """The trainer tested its kernels, with these results, and trained with masks."""
    window = {"value": list(paths)[-1], "reason": "as it came out"}

    def change(made: LaunchEvidence) -> LaunchEvidence:
        tested = {**(made.env or {})["attention"]["self_test"], "paths": paths}
        env = {**(made.env or {}), "attention": {"window": window, "self_test": tested}}
        return replace(made, env=env)

    return change


_AGREES = {"agrees": True, "refused": None, "problems": []}
_DISAGREES = {"agrees": False, "refused": None, "problems": ["k_win is off by 0.2 of itself"]}
_REFUSED = {"agrees": False, "refused": "no kernel", "problems": ["it could not run: no kernel"]}


@pytest.mark.parametrize(
    ("paths", "outcome", "code", "text"),
    [
        ({"varlen": _AGREES}, Outcome.PASS, Reason.OK, "the self-test agrees with varlen"),
        (
            {"varlen": _DISAGREES, "masked": _AGREES},
            Outcome.FAIL,
            Reason.MISMATCH,
            "rejected varlen: k_win is off by 0.2 of itself; masked ran instead",
        ),
        (
            {"varlen": _REFUSED, "masked": _AGREES},
            Outcome.PASS,
            Reason.WARNING,
            "rejected varlen: it could not run: no kernel; masked ran instead",
        ),
        ({"varlen": _REFUSED, "masked": _DISAGREES}, Outcome.FAIL, Reason.MISMATCH, "k_win"),
        ({"varlen": {**_DISAGREES, "agrees": True}}, Outcome.FAIL, Reason.MISMATCH, "k_win is off"),
    ],
)
def test_a_kernel_that_the_trainer_rejected_is_seen(
    paths: dict[str, Any], outcome: Outcome, code: Reason, text: str
) -> None:
    """In every launch, though the trainer went on without the kernel."""
    check = says(answers.row("sdpa_audit", "oracle", _self_tested(**paths)), (outcome, code), text)
    if outcome is Outcome.FAIL:
        assert "NSA_WINDOW=masked" in check.remedy and "env.json" in str(check.evidence)


def test_a_kernel_of_ours_that_disagrees_is_seen_beside_the_window_that_agrees() -> None:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        selected = {"value": "sdpa", "reason": "triton was rejected"}
        tested = _self_tested(triton=_DISAGREES, varlen=_AGREES)(made)
        return spoil.env(attention={"selected": selected})(tested)

    check = answers.row("baseline", "oracle", change)
    says(check, WRONG, "rejected triton", "varlen and sdpa ran instead")
    assert "NSA_USE_TRITON_SEL=0" in check.remedy


def _not_tested(**self_test: Any) -> spoil.Change:
    """As healthy, but for these words of the self-test; None takes all of it away."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        attention = (made.env or {})["attention"]
        told = {word: value for word, value in self_test.items() if word != "selected"}
        tested = {**attention["self_test"], **told} if told else None
        changed = {**attention, "self_test": tested}
        if "selected" in self_test:
            changed["selected"] = {"value": self_test["selected"], "reason": "asked for"}
        return spoil.env(attention=changed)(made)

    return change


UNTESTED = {
    "switched off": (
        {"ran": False, "reason": "NSA_SELF_TEST=off", "paths": {}},
        "no self-test on the GPU (NSA_SELF_TEST=off)",
    ),
    "missing": ({}, "no self-test on the GPU (env.json tells of none)"),
    "another way": ({"paths": {"masked": _AGREES}}, "tells nothing of varlen, which ran"),
    "no way": ({"paths": {}}, "tells nothing of varlen, which ran"),
    "no kernel of its own": (
        {"paths": {"varlen": _AGREES}, "selected": "triton"},
        "tells nothing of triton, which ran",
    ),
    "shorter": ({"seq_len": 128}, "was of S=128, bfloat16; trained was S=2048, bfloat16"),
    "another type": ({"dtype": "float32"}, "was of S=2048, float32; trained"),
}


@pytest.mark.parametrize("what", UNTESTED)
def test_kernels_that_were_not_tested_on_the_gpu_are_no_pass(what: str) -> None:
    told, text = UNTESTED[what]
    where = builder.context()
    names = [launch.name for launch in builder.PHASES["baseline"].plan(where)]
    check = answers.row("baseline", "oracle", _not_tested(**told), where, only=names[-1:])
    says(check, UNCOLLECTED, text, names[-1], remedy="NSA_SELF_TEST")
    assert check.required


def test_a_damaged_result_does_not_hide_the_kernel_that_failed() -> None:
    attention = {"self_test": {"ran": True, "paths": {"varlen": _DISAGREES, "masked": 5}}}

    def change(made: LaunchEvidence) -> LaunchEvidence:
        env = {**(made.env or {}), "attention": attention}
        kept, problems = shaped(env, ENV, "env.json")
        return replace(made, env=kept, problems=(*made.problems, *problems))

    says(answers.row("baseline", "oracle", change), DAMAGED, "env.json.attention.self_test.paths")


def test_gradients_that_were_left_over_have_a_remedy_of_their_own() -> None:
    def left(made: LaunchEvidence) -> LaunchEvidence:
        ending = made.ranks[1].ending
        shadow = {**ending["shadow"], "left": 640, "jumps": 3}
        return spoil.rank(1, ending={**ending, "shadow": shadow})(made)

    check = answers.row("baseline", "gradients", left)
    says(check, NOT_LEARNING, "640 of the elements watched")
    assert check.remedy.startswith("clear the gradients after every update")


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"updates": [198, 198]}, "look at what skips or repeats it"),
        ({"proof": {"logit_gradient": 0.5}}, "divided by train.accumulate_grad_batches"),
        ({"shadow": {"second_moment": 1e6}}, "at betas and epsilon"),
    ],
)
def test_what_is_wrong_with_an_update_names_where_to_look(
    wrong: dict[str, Any], remedy: str
) -> None:
    def spoiled(made: LaunchEvidence) -> LaunchEvidence:
        ending = dict(made.ranks[1].ending)
        for name, value in wrong.items():
            ending[name] = {**ending[name], **value} if isinstance(value, dict) else value
        return spoil.rank(1, ending=ending)(made)

    check = answers.row("baseline", "gradients", spoiled)
    assert (check.outcome, check.code) == (Outcome.FAIL, Reason.NOT_LEARNING)
    assert remedy in check.remedy


def test_checkpoints_that_were_left_out_have_a_remedy_of_their_own() -> None:
    def every_other(made: LaunchEvidence) -> LaunchEvidence:
        written = made.ranks[0].checkpoints
        assert len(written) > 2
        return spoil.rank(0, checkpoints=written[1::2])(made)

    where = builder.context("cpu")
    check = answers.row("long_run", "accounts", every_other, where, only=("run",))
    says(check, UNBALANCED, "no checkpoint of step 80, 240")
    assert check.title == "run left out checkpoints that train.save_every asks for."
    assert check.remedy.startswith("look at the condition under which the trainer begins a save")
    assert "long_run/run/heartbeat_rank0.jsonl" in check.remedy


def _learns(change: spoil.Change, **context: Any) -> Any:
    where = builder.context(**context)
    return answers.row("long_run", "learns", change, where)


def test_a_loss_that_stays_where_it_began_has_learned_nothing() -> None:
    stuck = spoil.columns(loss=lambda t: env_files.FLOOR + 0.01 * np.sin(t["step"]))
    check = says(_learns(stuck), NOT_LEARNING)
    assert check.limit == 0.1
    says(_learns(stuck, steps_scale=0.1), TOO_FEW)


def test_what_was_learned_is_held_against_the_limit_with_four_standard_errors() -> None:
    def losses(table: pd.DataFrame) -> pd.Series[float]:
        return 3.0 + 0.5 * np.sign(np.sin(math.pi * (table["step"] - 0.5)))

    value = _learns(spoil.columns(loss=losses)).measurement.value
    # The last 50 steps are 2.5 and 3.5 in turn: mean 3, standard error 0.5 / sqrt(50).
    worst = 3.0 + 4 * 0.5 / math.sqrt(50)
    assert value == pytest.approx((env_files.FLOOR - worst) / (env_files.FLOOR - env_files.ENTROPY))


def test_noise_teaches_nothing_however_low_its_loss() -> None:
    says(_learns(spoil.effective(dataset="synthetic", loss_floor=env_files.FLOOR)), OTHERWISE)


def test_one_rank_must_read_what_all_ranks_read_together() -> None:
    where = builder.context()
    before = builder.evidence("baseline", where)

    def answer(change: spoil.Change | None) -> Any:
        return answers.row(
            "single_gpu", "same_as_baseline", change, where, earlier={"baseline": before}
        )

    assert answer(None).outcome is Outcome.PASS
    for digest in ("1", "f" * 16):
        says(answer(spoil.steps_of(0, data=digest)), UNBALANCED, "read other data")
    higher = answer(spoil.columns(loss=lambda t: t["loss"] + 0.1))
    many = builder.evidence("baseline", where, change=spoil.without_rank_1)
    lost = answers.row("single_gpu", "same_as_baseline", where=where, earlier={"baseline": many})
    says(lost, NOTHING, "baseline/run1/heartbeat_rank1.jsonl")
    assert "the first loss of all ranks" in higher.reason


def test_weights_that_begin_otherwise_have_a_row_and_a_remedy() -> None:
    """Ten times too large, on one rank of two."""
    where = builder.context("cpu")

    def large(made: LaunchEvidence) -> LaunchEvidence:
        weights = (made.ranks[1].proof or {})["weights"]
        down = {**weights["mlp.down"], "rms": [10 * rms for rms in weights["mlp.down"]["rms"]]}
        return _proof(made, 1, weights={**weights, "mlp.down": down})

    check = answers.row("baseline", "oracle", large, where)
    says(check, WRONG, "rank 1: mlp.down begins with a deviation of 0.04082, has to be 0.004082")
    assert check.remedy.startswith("look at how the trainer draws its weights")
    healthy = answers.row("baseline", "oracle", where=where)
    assert "the weights of 16 groups begin as they have to" in healthy.reason


def test_another_selection_than_the_config_means_fails_every_phase_that_reads_it() -> None:
    """Not only the long run, whose gates are looked at."""
    health = traces.gates(60).assign(sel_blocks_mean=2.5)
    check = answers.row("baseline", "accounts", spoil.parts(gates=health))
    says(check, WRONG, "a query attends to 2.5 blocks, where n_sel=", remedy="statistics are wrong")
    assert check.title == "run1 tells of another selection than its config means."
