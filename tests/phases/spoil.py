"""Ways to spoil a healthy launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from runbook.records import LaunchStatus, RankExit
from runbook.records.evidence import JUnitCase, LaunchEvidence, TrainingLog

Change = Callable[[LaunchEvidence], LaunchEvidence]


def at(path: str, value: Any = None, /, **values: Any) -> Change:
    """What stands at a place of the evidence replaced, `ranks.1.proof.mean_high`; `*`: of each.

    values: several at once, below the place. A callable gets what was there, of a column its table.
    """
    keys = path.split(".") if path else []

    def change(made: LaunchEvidence) -> LaunchEvidence:
        for name, one in values.items():
            made = put(made, [*keys, name], one)
        return made if values else put(made, keys, value)

    return change


def put(there: Any, keys: list[str], value: Any) -> Any:
    """A copy of what is there, with another value at the end of these keys."""
    if not keys:
        return value(there) if callable(value) else value
    key, *rest = keys
    if isinstance(there, pd.DataFrame):
        return there.assign(**{key: value})
    if isinstance(there, tuple | list):
        mine = range(len(there)) if key == "*" else [int(key) % len(there)]
        return type(there)(put(one, rest, value) if n in mine else one
                           for n, one in enumerate(there))  # fmt: skip
    if there is None or isinstance(there, Mapping):
        return {**(there or {}), key: put((there or {}).get(key), rest, value)}
    inner = {key: put(getattr(there, key), rest, value)}
    return (
        there.model_copy(update=inner) if isinstance(there, BaseModel) else replace(there, **inner)
    )


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        for one in changes:
            made = one(made)
        return made

    return change


def of_launch(part: str, change: Change) -> Change:
    """The change of launches with this in their name only."""
    return lambda made: change(made) if part in made.launch.name else made


def jittered(log: TrainingLog, share: float, *, seed: int = 1) -> TrainingLog:
    """The same log with random step times; rates stay tokens / time."""
    changed = log.frame.copy()
    changed["dt_s"] *= np.random.default_rng(seed).normal(1.0, share, len(changed)).clip(0.5)
    changed["toks_per_s"] = changed["tokens"] / changed["dt_s"]
    return replace(log, frame=changed)


def jitter(share: float) -> Change:
    """So much jitter from step to step."""
    return at("training", lambda log: jittered(log, share))


def slower(by: Any) -> Change:
    """Steps that take so many times as long; a callable gets the frame."""

    def longer(table: Any) -> Any:
        return table["dt_s"] * (by(table) if callable(by) else by)

    return columns(dt_s=longer, toks_per_s=lambda table: table["tokens"] / table["dt_s"])


def ended(status: LaunchStatus, *, rows: int | None = None, cause: str = "made up") -> Change:
    """The launch ended badly, after `rows` rows."""
    said = {"status": status, "cause": cause, "culprit_rank": 1, "evidence": ("stacks.txt",)}
    cut = at("training.frame", lambda table: table.iloc[:rows])
    return lambda made: result(**said)(made if rows is None or not made.training else cut(made))


def columns(**values: Any) -> Change:
    """Columns of training.csv replaced; a callable gets the frame."""
    return at("training.frame", **values)


def cell(column: str, index: int, value: float) -> Change:
    """One value of a column of training.csv."""

    def changed(table: Any) -> Any:
        kept = table[column].astype(float).copy()
        kept.iloc[index] = value
        return kept

    return columns(**{column: changed})


def result(**values: Any) -> Change:
    """Fields of the launch's result replaced."""
    return at("result", **values)


def without_effect(toggle: str, *, took: bool | None = False, arm: str | None = None) -> Change:
    """The trainer's report on a toggle says no (`took` False), nothing (None), or is absent."""

    def told(effect: Any) -> Any:
        meant = effect.toggle == toggle and arm in (None, effect.arm)
        return replace(effect, took_effect=took) if meant else effect

    return at("ranks.*.effects.*", told)


def every_rank(**values: Any) -> Change:
    """Fields of all heartbeat logs replaced."""
    return at("ranks.*", **values)


def rank(number: int, **values: Any) -> Change:
    """Fields of one rank's heartbeat log replaced."""
    return at(f"ranks.{number}", **values)


def steps_of(number: int, **values: Any) -> Change:
    """What a rank tells of its steps replaced; a callable gets the table."""
    return at(f"ranks.{number}.steps", **values)


def parts(**values: Any) -> Change:
    """Fields of the launch's evidence replaced."""
    return at("", **values)


def cases(change: Callable[[JUnitCase], JUnitCase | None]) -> Change:
    """Each test of the launch's report replaced, or left out where there is nothing instead."""
    return at("junit.cases", lambda cases: tuple(one for case in cases if (one := change(case))))


def without_rank_1(made: LaunchEvidence) -> LaunchEvidence:
    """Both ranks ended with exit code 0, and the heartbeat file of rank 1 is no more there."""
    exits = tuple(RankExit(rank=rank, code=0) for rank in range(made.launch.nproc))
    return parts(ranks=made.ranks[:1])(result(ranks=exits)(made))
