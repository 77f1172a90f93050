"""Stability long run under the watchdog: no halt, steady, healthy gates, memory at its plateau."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from nsa.contract import HALT_FILE
from phases.compare import rates
from phases.kit import fixed_rules, specs
from phases.kit.case import Case
from phases.kit.commands import environment, scaled, trainer_launch
from phases.kit.finding import Finding, incomplete, invalid
from phases.kit.measure import against, log_value
from phases.kit.rows import Answer, Row, RowPhase, RowsOf
from phases.training import toggles_row, training_rows
from phases.training.memory import memory_limit, memory_plateau
from phases.training.own import own_learns, own_memory_limit, own_plateau
from phases.training.plausible import LOSS_WINDOW
from phases.training.resuming import resumed, stopped
from phases.training.stability import gates, no_halt, steadiness
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Mark, Outcome, Reason, Series, Stop

_LAUNCH, _STOPPED, _RESUMED = "run", "stopped", "resumed"
# Steps that a launch does before it is told to end, and those that it would have left.
_STEPS_BEFORE, _ROOM = 3, 200
_CHOSEN = ("NSA_DDP_BUCKET_MB", "NSA_OPT_FUSED")


class LongRun(RowPhase):
    """Requirements L1 to L8."""

    name = "long_run"
    order = 90
    title = "Stability long run"
    source = "requirements L1 to L8"
    question = "Does it keep going: no halt, steady, healthy, without a leak?"
    fixed = fixed_rules("long_run")
    reads = ("bucket_sweep", "fused_adamw")
    limits = specs(
        "drift", "stall_share", "learned_share", "gate_entropy_min", "gate_max_share",
        "gate_collapse_readings", "memory_gib", "flaky_launches",
    )  # fmt: skip

    def plan(self, context: PlanContext) -> list[Launch]:
        """A launch with what the earlier phases chose; where it saves, two that go on from it."""
        chosen = {
            name: context.choices[name]
            for name in _CHOSEN
            if name in context.choices and name not in context.toggles
        }
        said = ", ".join(f"{name}={value}" for name, value in chosen.items())
        total = scaled(context.profile.phases[self.name].steps, context)
        make = partial(
            trainer_launch,
            context,
            phase=self.name,
            env=environment(context, self.name, extra=chosen),
            # Noise cannot be learned: only a source with structure shows that a model learns.
            dataset="markov",
            # All follow one schedule, so that they can be held against each other.
            extra=("--run-steps", str(total + _ROOM)) if _saves(context) else (),
        )
        purpose = f"stability and learning; chosen by earlier phases: {said or 'nothing'}"
        run = make(name=_LAUNCH, watched=True, purpose=purpose)
        saving = _scaled_saving(run, context)
        if not saving:
            return [run]
        after = saving["train.keep_every"]
        stopped = make(
            name=_STOPPED,
            steps=total + _ROOM,
            purpose=f"from step {after} again, until a signal",
            resumes=_LAUNCH,
            after=after,
            stop=Stop(by="SIGTERM", steps=_STEPS_BEFORE),
        )
        again = make(
            name=_RESUMED,
            steps=total + _ROOM,
            purpose=f"on from where {_STOPPED} ended, until it is halted",
            resumes=_STOPPED,
            # Beyond the next save, which has to be that of the launch that was not stopped.
            stop=Stop(by=HALT_FILE, steps=saving["train.save_every"]),
        )
        return [
            one.model_copy(update={"config_overrides": {**one.config_overrides, **saving}})
            for one in (run, stopped, again)
        ]

    def names(self, case: Case) -> Sequence[str]:  # noqa: ARG002
        """The long one; what goes on from it has rows of its own."""
        return [_LAUNCH]

    def asked(self, context: PlanContext) -> Sequence[Row]:
        """Where the profile has it save, also what becomes of a launch that is stopped."""
        return (*self.rows(), *(_STOPPING if _saves(context) else ()))

    def instead(self, case: Case, row: Row) -> Finding | None:
        """Why nothing was stopped."""
        if row not in _STOPPING or len(self.plan(case.context)) > 1:
            return None
        every = case.context.config_overrides.get("train.save_every", "as it is")
        reason = f"train.save_every={every} leaves no checkpoint that a launch could go on from"
        return incomplete(Reason.NOT_RUN, reason)

    def rows(self) -> Sequence[Row]:
        """Stability, each aspect by itself."""
        each = self.row.each
        # What is stopped has to end well too.
        completed = training_rows(super().names)[0]
        return (
            completed,
            *training_rows(self.names)[1:],
            toggles_row(self.names),
            each("no_halt", no_halt),
            each("steady", steadiness),
            each("learns", _either(_learns, own_learns)),
            each("gates", gates),
            each("memory_plateau", _either(memory_plateau, own_plateau)),
            each("memory_limit", _either(memory_limit, own_memory_limit)),
        )

    def details(self, case: Case) -> Judgement:
        """Throughput table and the curves."""
        title = "Throughput of the long run"
        return rates.shown(case, [_LAUNCH], title=title, curves=_curves(case), health_of=_LAUNCH)


def _saves(context: PlanContext) -> bool:
    """Does the profile have the long run save?"""
    settings = context.profile.phases[LongRun.name]
    return bool(settings.config_overrides.get("train.save_every"))


def _scaled_saving(run: Launch, context: PlanContext) -> dict[str, int]:
    """Saves and evaluations in proportion to the steps, and the save that stays to go on from.

    Empty where there is none before three fifths of the steps. What a person gave stays.
    """
    given = run.config_overrides
    every = {
        key: value if key in context.config_overrides else scaled(value, context)
        for key in ("train.save_every", "train.eval_every")
        if isinstance(value := given.get(key), int) and value > 0
    }
    save = every.get("train.save_every", 0) if _saves(context) and run.own is None else 0
    after = run.steps * 3 // 5 // save * save if save else 0
    return {**every, "train.keep_every": after} if after else {}


_STOPPING = (
    RowsOf("long_run").one("stopped", partial(stopped, names=(_STOPPED, _RESUMED))),
    RowsOf("long_run").one("resumed", partial(resumed, first=_LAUNCH, others=(_STOPPED, _RESUMED))),
)


def _either(ours: Answer, theirs: Answer) -> Answer:
    """The answer for our trainer, or that for one of one's own."""
    return lambda case, name: (theirs if case.profile.own_trainer else ours)(case, name)


def _learns(case: Case, name: str) -> Finding:
    """How far the loss came from knowing nothing, ln(V), to the data's entropy rate.

    Held against the limit is the loss of the last window plus four standard errors.
    """
    log, env = case.log(name), case.env(name)
    effective = env.get("effective") or {}
    dataset, floor = effective.get("dataset"), effective.get("loss_floor")
    start = math.log(max(2, int(effective.get("vocab_size") or 0)))
    if dataset != "markov" or floor is None or not 0 < floor < start:
        reason = f"{name} trained on {dataset} with a floor of {floor}: nothing to learn there"
        raise invalid(Reason.MISMATCH, reason)
    last = log.frame["loss"].iloc[-LOSS_WINDOW:]
    if not all(map(math.isfinite, last)):
        raise incomplete(Reason.NON_FINITE, "the loss is not finite at the end")
    loss = float(last.mean()) + 4 * float(last.std(ddof=0)) / math.sqrt(len(last))
    value = log_value(
        log,
        "learned_share",
        (start - loss) / (start - floor),
        "share",
        rows=(len(log.frame) - len(last), len(log.frame) - 1),
    )
    text = f"loss {loss:.3f}, from ln(V) {start:.3f} towards the entropy rate {floor:.3f}"
    found = against(value, case.limit("learned_share"), text)
    if found.outcome is not Outcome.FAIL:
        return found
    if case.context.steps_scale < 1:  # cut short on purpose: the limit is for the whole run
        return replace(found, outcome=Outcome.INCONCLUSIVE, code=Reason.TOO_FEW_SAMPLES)
    return replace(found, code=Reason.NOT_LEARNING)


def _curves(case: Case) -> Iterator[Series]:
    """Loss and memory of the run, each with what it is held against."""
    share = case.limit("learned_share")

    def wanted(start: float, floor: float) -> list[Mark]:
        level = start - share.value * (start - floor)
        shown = share.gated and math.isfinite(level)
        return [Mark(label="has to come below", value=level)] if shown else []

    most = rates.marks(case.limit("memory_gib"), "limit of each rank")
    # What the allocator held decides the limit; what tensors take, the plateau.
    kinds = {"memory": "reserved_mib", "tensors": "mem_mib"}
    told = kinds if case.profile.has_gpu else {"memory": "mem_mib"}
    yield from rates.losses(case, _LAUNCH, wanted)
    for group, column in told.items():
        yield from rates.memories(case, _LAUNCH, column, group=group, limits=most)
