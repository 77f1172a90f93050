"""A phase of a plan: training for some steps, and the gate that it has to pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from phases.compare import rates
from phases.kit import spec, specs
from phases.kit.case import Case
from phases.kit.commands import trainer_launch
from phases.kit.finding import Finding, inconclusive, missing, skipped
from phases.kit.measure import against, derived, log_value
from phases.kit.rows import Row, RowPhase, RowsOf
from phases.machine.samples import balance, utilisation
from phases.training import memory, stability, toggles_row, training_rows
from phases.training.resuming import checkpoint_time, resumed, storage
from runbook.config import Profile
from runbook.config.registry import Judgement, Made, PlanContext
from runbook.records import Launch, Reason
from runbook.records.evidence import LaunchEvidence
from runbook.records.measurement import duration_text

_RUN, _RESUMED = "run", "resumed"
_ALWAYS = ("completed", "as_planned")


class TrainingStage(RowPhase, Made):
    """Kind `training`: launches of the plan's steps, judged by the checks that the plan names."""

    optional = True
    limits = specs(
        "throughput", "throughput_aim_low", "throughput_aim_high", "mfu_floor",
        "gpu_utilisation", "gpu_imbalance", "drift", "stall_share", "memory_gib",
        "gate_entropy_min", "gate_max_share", "gate_collapse_readings", "checkpoint_share",
        "flaky_launches",
    )  # fmt: skip

    @classmethod
    def known_checks(cls) -> tuple[str, ...]:
        """Every row that there is."""
        return tuple(row.what for row in _catalog(lambda _: [_RUN]))

    def needed(self, profile: Profile) -> tuple[str, ...]:
        """The plan's checks without those that this machine cannot answer, or only shows."""
        return tuple(f"{self.name}.{what}" for what in self._has() if _can_decide(what, profile))

    def _has(self) -> tuple[str, ...]:
        """The checks that the plan names, after those without which no launch means anything."""
        return tuple(dict.fromkeys((*_ALWAYS, *self.stage.checks)))

    def plan(self, context: PlanContext) -> list[Launch]:
        """The legs, each from the checkpoint of the one before, and the resumed launch if any."""
        stage, settings = self.stage, context.profile.phases[self.name]
        total = max(stage.least_steps, round(settings.steps * context.steps_scale))
        make = partial(
            trainer_launch, context, phase=self.name, dataset=stage.dataset, watched=True
        )
        if stage.legs > 1:
            return self._legs(make, total)
        run = make(name=_RUN, steps=total, purpose=f"{total} steps on {stage.dataset}")
        if not stage.resume_steps:
            return [run]
        again = max(1, min(round(stage.resume_steps * context.steps_scale), (total - 1) // 2))
        again = max(again, min(5, (total - 1) // 2))
        saved = {**run.config_overrides, "train.save_every": total - again}
        purpose = f"the last {again} steps again, from the checkpoint of step {total - again}"
        second = make(
            name=_RESUMED, steps=total, purpose=purpose, resumes=_RUN, after=total - again
        )
        return [run.model_copy(update={"config_overrides": saved}), second]

    def _legs(self, make: Callable[..., Launch], total: int) -> list[Launch]:
        count = min(self.stage.legs, total)
        ends = [total * number // count for number in range(count + 1)]
        width = len(str(count))
        names = [f"leg{number:0{width}}" for number in range(1, count + 1)]
        return [
            make(
                name=name,
                steps=end,
                purpose=f"steps {begin + 1} to {end} of {total} on {self.stage.dataset}",
                # Every leg follows one schedule, that of the run.
                extra=("--save", "--run-steps", str(total)),
                resumes=before,
                after=begin,
            )
            for name, before, begin, end in zip(names, ["", *names], ends, ends[1:], strict=False)
        ]

    def names(self, case: Case) -> Sequence[str]:
        """The launches that the gate is about; the resumed one only has its own row."""
        return [name for name in super().names(case) if name != _RESUMED]

    def rows(self) -> Sequence[Row]:
        """Those that it has, in the order of the kind."""
        return [row for row in _catalog(self.names) if row.what in self._has()]

    def details(self, case: Case) -> Judgement:
        """Throughput of each launch, and the curves of the last one."""
        names = self.names(case)
        return rates.shown(
            case,
            names,
            title="Throughput of each launch",
            curves=rates.losses(case, names[-1]),
            health_of=names[-1],
        )


def _catalog(names: Callable[[Case], Sequence[str]]) -> tuple[Row, ...]:
    """Every row of the kind; those that ask one launch give the worst over all."""
    row = RowsOf("stage", names)
    return (
        *training_rows(names),
        toggles_row(names),
        row.each("heartbeats", stability.heartbeats),
        row.each("past_step_5", stability.past_step_5),
        row.each("no_halt", stability.no_halt),
        row.each("steady", stability.steadiness),
        row.each("throughput", _throughput),
        row.together("throughput_aim", rates.aim),
        row.together("mfu", rates.mfu),
        row.together("gpu_utilisation", utilisation),
        row.together("gpu_balance", balance),
        row.each("gates", stability.gates),
        row.each("memory_plateau", memory.memory_plateau),
        row.each("memory_limit", memory.memory_limit),
        row.together("storage", storage),
        row.together("checkpoint_time", checkpoint_time),
        row.together("goodput", _goodput),
        row.one("resumed", partial(resumed, first=_RUN, others=(_RESUMED,))),
    )


def _throughput(case: Case, name: str) -> Finding:
    """Tokens over time of one launch against the profile's floor."""
    rate = rates.launch_rate(case, name)
    return against(rate, case.limit("throughput"), f"throughput: {rate}")


def _can_decide(what: str, profile: Profile) -> bool:
    """Does this row decide on this machine? What it only shows, or has not got, cannot."""
    gpus = profile.hardware.gpus
    gated = {
        "steady": _gated(profile, "drift", "stall_share"),
        "throughput": _gated(profile, "throughput"),
        "throughput_aim": False,
        "mfu": profile.throughput_gated and profile.hardware.peak_tflops is not None,
        "gpu_utilisation": gpus > 0 and _gated(profile, "gpu_utilisation"),
        "gpu_balance": gpus > 1 and profile.ranks > 1 and _gated(profile, "gpu_imbalance"),
        "devices": gpus > 0,
        "checkpoint_time": _gated(profile, "checkpoint_share"),
        "memory_limit": _gated(profile, "memory_gib"),
        "other_work": False,
        "goodput": False,
    }
    return gated.get(what, True)


def _gated(profile: Profile, *limits: str) -> bool:
    """Do these limits decide? One that is missing is told with everything else that is wrong."""
    return all(name in profile.limits and profile.limit(spec(name)).gated for name in limits)


# -- row `goodput`: what became of the time between a launch's first start and its end -------------
#
#     wall time = steps + pauses + starting + lost + waiting
#
# A step counts if the weights at the end came from it. Its time is `dt_s`, by the trainer's
# monotonic clock. What lies around it is the difference to the ranks' times of day, and the rest to
# what the harness's monotonic clock saw: where clocks disagree, a part is below zero.

# Starts are written to the second.
_START_S = 1.0
# Of the wall time, what clocks of one machine may differ by.
_CLOCKS = 0.01
_PARTS = ("steps", "pauses", "starting", "lost", "waiting")


@dataclass
class Time:
    """Seconds of a launch by what became of them.

    `steps` and `pauses` (evaluations, checkpoints) led to the weights at the end. `starting` is
    until the first step ended, that step included, and from the last one to the end. `lost` is
    all other training, and the time until its end was noticed. In `waiting` nothing ran.
    """

    steps: float = 0.0
    pauses: float = 0.0
    starting: float = 0.0
    lost: float = 0.0
    waiting: float = 0.0
    wall: float = 0.0
    starts: int = 0

    @property
    def below_zero(self) -> list[str]:
        """Parts by which clocks disagree, or two starts ran at once."""
        most = _CLOCKS * self.wall + _START_S
        return [name for name in _PARTS if getattr(self, name) < -most]

    def __str__(self) -> str:
        told = ", ".join(f"{name} {duration_text(getattr(self, name))}" for name in _PARTS)
        return f"{told} of {duration_text(self.wall)} in {self.starts} start(s)"


def _goodput(case: Case, names: Sequence[str]) -> Finding:
    """Shown: the share of the wall time that went into steps which count."""
    legs = [case.completed(name) for name in names]
    time = time_of(legs)
    share = time.steps / time.wall
    logs = [log_value(case.log(name), "goodput", share, "") for name in names]
    value = derived(logs[-1], name="goodput", value=share, unit="", also=logs)
    folders = [one.folder for leg in legs for one in leg.aside]
    if below := time.below_zero:
        text = f"{time}: below zero is {', '.join(below)}: two clocks disagree, or one was set back"
        return inconclusive(Reason.UNDECIDED, text, measurement=value, evidence=folders)
    return skipped(
        Reason.NOT_GATED, f"{time}; shown, not gated", measurement=value, evidence=folders
    )


def time_of(legs: Sequence[LaunchEvidence]) -> Time:
    """The time of finished launches, each of which goes on from the one before.

    Raises a finding where one has no step.
    """
    time = Time()
    aside = {one.folder: one for leg in legs for one in leg.aside}
    begins = [datetime.fromisoformat(leg.result.started_at).timestamp() for leg in legs]
    ends = [begin + leg.result.duration_s for leg, begin in zip(legs, begins, strict=True)]
    for number, leg in enumerate(legs):
        _count(time, leg, kept=min((one.after for one in legs[number + 1 :]), default=None))
    for one in aside.values():
        first = one.ended if one.first_step is None else one.first_step
        time.starting += first - one.began
        time.lost += one.ended - first
    spans = sorted(
        [*zip(begins, ends, strict=True), *((one.began, one.ended) for one in aside.values())]
    )
    time.starts = len(spans)
    time.wall = max(ends) - spans[0][0]
    reached = spans[0][1]
    for begin, end in spans[1:]:
        time.waiting += begin - reached
        reached = max(reached, end)
    return time


def _count(time: Time, leg: LaunchEvidence, *, kept: int | None) -> None:
    """A leg that finished; of its steps those beyond `kept` were trained again by a later one."""
    marks = leg.ranks[0].steps if leg.ranks else None
    if leg.training is None or marks is None or marks.empty:
        raise missing(f"{leg.launch.name} has no step", leg.launch.run_dir)
    rows = leg.training.frame.iloc[1:]
    counts = rows["step"] <= kept if kept is not None else rows["step"] > 0
    trained = float(marks["ts"].iloc[-1] - marks["ts"].iloc[0])
    time.steps += float(rows["dt_s"][counts].sum())
    time.lost += float(rows["dt_s"][~counts].sum())
    time.pauses += trained - float(rows["dt_s"].sum())
    time.starting += leg.result.duration_s - trained
