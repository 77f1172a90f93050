"""Ways to spoil a healthy launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from runbook.records import LaunchStatus, RankExit
from runbook.records.evidence import JUnitCase, LaunchEvidence, TrainingLog

Change = Callable[[LaunchEvidence], LaunchEvidence]


def jittered(log: TrainingLog, share: float, *, seed: int = 1) -> TrainingLog:
    """The same log with random step times; rates stay tokens / time."""
    changed = log.frame.copy()
    changed["dt_s"] *= np.random.default_rng(seed).normal(1.0, share, len(changed)).clip(0.5)
    changed["toks_per_s"] = changed["tokens"] / changed["dt_s"]
    return replace(log, frame=changed)


def jitter(share: float) -> Change:
    """So much jitter from step to step."""
    return lambda made: replace(made, training=jittered(made.training, share))


def slower(by: Any) -> Change:
    """Steps that take so many times as long; a callable gets the frame."""

    def longer(table: Any) -> Any:
        return table["dt_s"] * (by(table) if callable(by) else by)

    return columns(dt_s=longer, toks_per_s=lambda table: table["tokens"] / table["dt_s"])


def ended(status: LaunchStatus, *, rows: int | None = None, cause: str = "made up") -> Change:
    """The launch ended badly, after `rows` rows."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        log = made.training
        if rows is not None and log is not None:
            log = replace(log, frame=log.frame.iloc[:rows])
        said = {"status": status, "cause": cause, "culprit_rank": 1, "evidence": ("stacks.txt",)}
        return replace(result(**said)(made), training=log)

    return change


def columns(**values: Any) -> Change:
    """Columns of training.csv replaced; a callable gets the frame."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        table = made.training.frame.copy()
        for name, value in values.items():
            table[name] = value(table) if callable(value) else value
        return replace(made, training=replace(made.training, frame=table))

    return change


def env(**values: Any) -> Change:
    """Entries of env.json replaced; of a block only those that are given."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        found = dict(made.env or {})
        for name, value in values.items():
            block = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = {**found[name], **value} if block else value
        return replace(made, env=found)

    return change


def effective(**values: Any) -> Change:
    """Entries of env.json's effective block replaced."""
    return env(effective=values)


def result(**values: Any) -> Change:
    """Fields of the launch's result replaced."""
    return lambda made: replace(made, result=made.result.model_copy(update=values))


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        for one in changes:
            made = one(made)
        return made

    return change


def without_effect(toggle: str, *, took: bool | None = False, arm: str | None = None) -> Change:
    """The trainer's report on a toggle says no (`took` False), nothing (None), or is absent."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        logs = tuple(
            replace(
                log,
                effects=tuple(
                    replace(effect, took_effect=took)
                    if effect.toggle == toggle and (arm is None or effect.arm == arm)
                    else effect
                    for effect in log.effects
                ),
            )
            for log in made.ranks
        )
        return replace(made, ranks=logs)

    return change


def every_rank(**values: Any) -> Change:
    """Fields of all heartbeat logs replaced."""
    return lambda made: replace(made, ranks=tuple(replace(log, **values) for log in made.ranks))


def rank(number: int, **values: Any) -> Change:
    """Fields of one rank's heartbeat log replaced."""
    return lambda made: replace(
        made,
        ranks=tuple(replace(log, **values) if log.rank == number else log for log in made.ranks),
    )


def steps_of(number: int, **values: Any) -> Change:
    """What a rank tells of its steps replaced; a callable gets the table."""
    return lambda made: rank(number, steps=made.ranks[number].steps.assign(**values))(made)


def inside(part: str, **values: Any) -> Change:
    """Entries of a document of the launch's evidence replaced."""
    return lambda made: replace(made, **{part: {**(getattr(made, part) or {}), **values}})


def cases(change: Callable[[JUnitCase], JUnitCase | None]) -> Change:
    """Each test of the launch's report replaced, or left out where there is nothing instead."""

    def changed(made: LaunchEvidence) -> LaunchEvidence:
        kept = tuple(one for case in made.junit.cases if (one := change(case)))
        return replace(made, junit=replace(made.junit, cases=kept))

    return changed


def parts(**values: Any) -> Change:
    """Fields of the launch's evidence replaced."""
    return lambda made: replace(made, **values)


def without_rank_1(made: LaunchEvidence) -> LaunchEvidence:
    """Both ranks ended with exit code 0, and the heartbeat file of rank 1 is no more there."""
    exits = tuple(RankExit(rank=rank, code=0) for rank in range(made.launch.nproc))
    return replace(result(ranks=exits)(made), ranks=made.ranks[:1])
