"""What the A/B phases share: the control, unlike arms, and stopping when the answer is known."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from runbook.config import registry
from runbook.records import Outcome, Reason
from runbook.records.evidence import PhaseEvidence
from tests.phases import answers, builder, spoil, traces
from tests.phases.answers import UNLIKE, WHERE, get, said, says

PHASES = registry.phases()


def with_baseline(
    rates: tuple[float, ...] = (1e5, 1.01e5, 0.99e5, 1.01e5, 0.99e5),
) -> dict[str, PhaseEvidence]:
    launches = {
        launch.name: traces.healthy(launch, WHERE.profile, rate=rate)
        for launch, rate in zip(PHASES["baseline"].plan(WHERE), rates, strict=True)
    }
    return {"baseline": PhaseEvidence(launches=launches)}


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (1.0e5, (Outcome.PASS, Reason.OK)),
        (1.03e5, (Outcome.PASS, Reason.OK)),
        (2.5e5, (Outcome.INVALID, Reason.NOT_COMPARABLE)),
        (0.5e5, (Outcome.INVALID, Reason.NOT_COMPARABLE)),
    ],
)
@pytest.mark.parametrize("phase", ["bucket_sweep", "fused_adamw"])
def test_the_control_arm_has_to_reproduce_the_baseline(
    phase: str, rate: float, expected: tuple[Outcome, Reason]
) -> None:
    says(answers.row(phase, "control", rate=rate, earlier=with_baseline()), expected)


def test_the_control_is_held_against_a_prediction_interval() -> None:
    """Student's t for one more launch: mean ± t s sqrt(1 + 1/n) of the logs, by hand."""
    rates = (1e5, 1.08e5, 0.95e5, 1.02e5, 0.97e5)
    value = answers.row(
        "bucket_sweep", "control", rate=1e5, earlier=with_baseline(rates)
    ).measurement
    logs = [math.log(rate) for rate in rates]
    reach = 4.604095 * statistics.stdev(logs) * math.sqrt(6 / 5)  # t(0.995; 4), printed tables
    low, high = (math.exp(statistics.mean(logs) + side) for side in (-reach, reach))
    assert value is not None and value.interval == pytest.approx((low, high), rel=1e-6)


def test_two_baseline_launches_have_an_interval_and_one_has_none() -> None:
    whole = with_baseline()["baseline"].launches
    for count, outcome in ((1, Outcome.INCONCLUSIVE), (2, Outcome.PASS)):
        earlier = {"baseline": PhaseEvidence(launches=dict(list(whole.items())[:count]))}
        assert answers.row("bucket_sweep", "control", rate=1e5, earlier=earlier).outcome is outcome


def test_a_control_on_another_config_is_not_comparable() -> None:
    check = answers.row(
        "bucket_sweep", "control", spoil.effective(seq_len=128), earlier=with_baseline()
    )
    says(check, UNLIKE, "seq_len")


def test_without_a_baseline_there_is_no_control() -> None:
    assert answers.row("bucket_sweep", "control").code is Reason.NOT_ASKED_FOR


@pytest.mark.parametrize(("phase", "what"), [("bucket_sweep", "best"), ("fused_adamw", "keep")])
def test_arms_of_different_commits_choose_nothing(phase: str, what: str) -> None:
    where = builder.context(protocol="launches")
    last = PHASES[phase].plan(where)[-1].name

    newer = spoil.env(git={"sha": "2" * 40})
    found = builder.evidence(phase, where, change=newer, only=[last])
    judgement = builder.judge(phase, found, where)
    assert said(get(judgement, f"{phase}.{what}")) == (Outcome.INVALID, Reason.NOT_COMPARABLE)
    assert judgement.choices == {}


@pytest.mark.parametrize("phase", ["bucket_sweep", "fused_adamw"])
def test_a_run_may_stop_when_the_answer_is_known(phase: str) -> None:
    (launch,) = PHASES[phase].plan(WHERE)
    clear = traces.healthy(launch, WHERE.profile, rates={"25": 2e5, "fused": 2e5})
    log = spoil.jittered(clear.training, 0.01)
    assert PHASES[phase].enough(log, launch, WHERE)
    row = len(launch.schedule.rounds[0]) * (launch.schedule.steps + launch.schedule.warmup_steps)
    early = replace(log, frame=log.frame.iloc[: 2 * row])
    assert not PHASES[phase].enough(early, launch, WHERE)
    assert not PHASES[phase].enough(replace(log, frame=log.frame.iloc[:0]), launch, WHERE)
