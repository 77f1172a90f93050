"""What to do about a cause: what is likely behind it, what to type next, and the steps after that.

Everything is a fact of the run: what a person set, which trainer it was, what the judges found in
the evidence. Nothing here knows a kind of failure by its name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import ValidationError

from runbook.config.precedence import SHELL, Given, given
from runbook.config.profile import Profile
from runbook.engine.scope import profile_of, shipped_like
from runbook.records import RunRecord
from runbook.records.outcome import STEP
from runbook.records.run import edited

# More settings than this are counted.
_NAMED = 3
_SHIPPED_TRAINER = str(Profile.model_fields["trainer"].default)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a reader does about one cause.

    `likely` are sentences, and `seen` is what the evidence shows of the cause. `command` is what to
    type next, and `does` says in a sentence what that is for. `steps` are to be taken in their
    order. `left_out` are the settings that `command` lacks; `shipped`: it runs the shipped trainer.
    """

    likely: tuple[str, ...]
    command: str
    does: str
    steps: tuple[str, ...]
    seen: str = ""
    left_out: tuple[Given, ...] = ()
    shipped: bool = False


class Adviser:
    """Advice on the causes of one run."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    @cached_property
    def by_hand(self) -> tuple[Given, ...]:
        """The settings that a person gave and that are not as in the profile."""
        record = self.record
        found = given(record.settings, record.sources, values_before(record))
        return tuple(one for one in found if not one.as_in_profile)

    @cached_property
    def other_trainer(self) -> str:
        """The trainer's module where it is not the shipped one, and has its contract."""
        document = self.record.profile_document
        trainer = document.get("trainer", _SHIPPED_TRAINER)
        other = trainer != _SHIPPED_TRAINER and not document.get("own_trainer")
        return str(trainer) if other else ""

    @cached_property
    def _shipped_profile(self) -> str:
        """The shipped profile of the same kind of machine; empty if the record cannot tell."""
        try:
            return shipped_like(profile_of(self.record)).name
        except ValidationError:  # a record of another version
            return ""

    def on(
        self,
        *,
        clue: str,
        remedy: str,
        rerun: str,
        first: str,
        ran: bool,
        goes_on: bool,
        of_machine: bool = False,
    ) -> Advice:
        """Advice on a cause.

        `clue`, `remedy`, `rerun` and `first` are those of its check. `ran`: a launch of its phase
        was started, which settings and trainer may be to blame for. `goes_on`: it was cut off, and
        `rerun` continues it. `of_machine`: its check asks what the machine has, so that what the
        evidence shows is the likely cause.
        """
        steps = tuple(remedy.split(STEP)) if remedy else ()
        if goes_on or not rerun:
            does = "This goes on with the run." if rerun else ""
            return Advice(likely=(), command=rerun, does=does, steps=steps)
        settings = self.by_hand if ran else ()
        trainer = self.other_trainer if ran else ""
        found = Advice(
            likely=(*_of_settings(settings), *_of_trainer(trainer)),
            seen=clue,
            command=first or rerun,
            does=_what_it_shows(rerun, first),
            steps=steps,
        )
        if settings:
            return _without_settings(found, rerun, settings)
        if trainer:
            return self._of_other_trainer(found, rerun, trainer)
        return replace(found, likely=(clue,), seen="") if of_machine and clue else found

    def _of_other_trainer(self, found: Advice, rerun: str, trainer: str) -> Advice:
        """The shipped trainer next."""
        after = (f"if the shipped trainer passes, look in {trainer}", *found.steps)
        if not self._shipped_profile:
            return replace(found, steps=after)
        shipped = edited(rerun, profile=self._shipped_profile)
        does = "This runs the shipped trainer."
        return replace(found, command=shipped, does=does, steps=after, shipped=True)


def _without_settings(found: Advice, rerun: str, settings: tuple[Given, ...]) -> Advice:
    """What was set by hand is left out first, and the remedy comes after that."""
    words = " ".join(f"--set {shlex.quote(one.text)}" for one in settings)
    steps: tuple[str, ...] = (f"first without {words}, which was set by hand",)
    if found.steps:
        steps = (*steps, f"if it comes back: {found.steps[0]}", *found.steps[1:])
    return replace(
        found,
        command=without(rerun, settings),
        does=f"This leaves out {_counted([one.text for one in settings])}.",
        steps=steps,
        left_out=settings,
    )


def values_before(record: RunRecord) -> dict[str, str]:
    """What the run's profile and its config set, as far as a person changed the config."""
    env = record.profile_document.get("env")
    known = env if isinstance(env, Mapping) else {}
    variables = {n: str(one.get("value")) for n, one in known.items() if isinstance(one, Mapping)}
    return variables | record.config_before


def without(line: str, settings: Iterable[Given]) -> str:
    """The command without these settings, which may come from the shell that it is typed in."""
    dropped = list(settings)
    shorter = edited(line, without=[one.name for one in dropped])
    unset = [word for one in dropped if one.source == SHELL for word in ("-u", one.name)]
    return f"{shlex.join(['env', *unset])} {shorter}" if unset else shorter


def _of_settings(settings: tuple[Given, ...]) -> Iterator[str]:
    if len(settings) > _NAMED:
        yield f"{_counted([one.text for one in settings])} were set by hand."
        return
    for one in settings:
        before = "" if one.before is None else f"; the {one.owner} has {one.before}"
        yield f"{one.text} was set by hand ({one.source}){before}."


def _of_trainer(trainer: str) -> Iterator[str]:
    if trainer:
        yield f"This run used another trainer ({trainer}). Try the shipped one first."


def _what_it_shows(rerun: str, first: str) -> str:
    """What the next command is for."""
    if not first:
        return "This reproduces the failure; nothing more specific is known."
    added = _added(rerun, first)
    return f"This adds {_counted(added)}." if added else "This shows what is there."


def _added(rerun: str, first: str) -> list[str]:
    """The settings that a remedy's first command has on top of the command that reproduces."""
    before = _words(rerun)
    return [word for word in _words(first) if "=" in word and word not in before]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []


def _counted(texts: list[str]) -> str:
    """`a, b, c and 2 more`."""
    more = len(texts) - _NAMED
    return f"{', '.join(texts[:_NAMED])}{f' and {more} more' if more > 0 else ''}"
