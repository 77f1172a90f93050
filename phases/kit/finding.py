"""The answer to one row's question, and what the end of a launch says of every row about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from nsa.contract import HEARTBEATS
from phases.kit import table
from runbook.config import Limit
from runbook.errors import listed
from runbook.records import Confidence, LaunchStatus, Measurement, Outcome, Reason
from runbook.records.evidence import LaunchEvidence


@dataclass
class Finding(Exception):
    """Outcome, closed reason code and a sentence; with the number and the limit if there is one.

    An answer returns it; a guard raises it where a row's question has none. `topic` names the
    playbook entry that fixes it; the row's own topic is the default. `follows` as in `Check`: a
    launch, another check, a phase, or what the machine does not have. So are `title`, `clue`,
    `nodes`, `confidence` and `choice`. A number that a `limit` was held against names all its files
    as evidence, any other one the first.
    """

    outcome: Outcome
    code: Reason
    reason: str
    _: KW_ONLY
    measurement: Measurement | None = None
    limit: Limit | None = None
    evidence: Sequence[str] = ()
    topic: str = ""
    follows: str = ""
    title: str = ""
    clue: str = ""
    nodes: Sequence[str] = ()
    confidence: Confidence = Confidence.NONE
    choice: str = ""

    def __post_init__(self) -> None:
        files = self.measurement.sources if self.measurement else ()
        paths = [*self.evidence, *(one.path for one in (files if self.limit else files[:1]))]
        self.evidence = tuple(dict.fromkeys(filter(None, paths)))

    def __str__(self) -> str:
        return self.reason


# The answer is yes.
passed = partial(Finding, Outcome.PASS, Reason.OK)
# A fault of the thing under test.
failed = partial(Finding, Outcome.FAIL)
# Not comparable, not plausible, or the environment is wrong.
invalid = partial(Finding, Outcome.INVALID)
# No evidence: not run, or cut off.
incomplete = partial(Finding, Outcome.INCOMPLETE)
# Measured, but not decidable at the declared error rate.
inconclusive = partial(Finding, Outcome.INCONCLUSIVE)
# The question does not arise here; the reason says why.
skipped = partial(Finding, Outcome.SKIPPED)


def warned(reason: str, **more: Any) -> Finding:
    """Nothing is wrong enough to stop, but a person should read it."""
    return Finding(Outcome.PASS, Reason.WARNING, f"WARNING: {reason}", **more)


def in_a_row(problems: Sequence[str]) -> str:
    """The problems in one line."""
    return listed(problems, 20, between="; ")


def missing(reason: str, *paths: str, follows: str = "") -> Finding:
    """To be raised where what a row is answered from is not there."""
    return incomplete(Reason.MISSING_ARTIFACT, reason, evidence=paths, follows=follows)


def whole(launch: LaunchEvidence, file: str, kind: str) -> None:
    """Raise INVALID where a part of this file could not be read."""
    if problems := [text for text in launch.problems if file in text]:
        raise invalid(Reason.DAMAGED_ARTIFACT, problems[0], evidence=(launch.path(kind),))


# Its cause says the rest of such an end.
_SAID = {LaunchStatus.NON_FINITE: "ended"}


def ending(launch: LaunchEvidence) -> Finding:
    """What the end of a launch says: PASS if it finished; rows follow from any other end."""
    result = launch.result
    paths = (*result.evidence, launch.path("console"))
    name = launch.launch.name
    if result.ok:
        return passed(f"{name} finished in {result.duration_s:.0f} s", evidence=paths)
    known = table("endings")
    outcome, code, topic = known["status"][result.status]
    topic = known["kind"].get(result.kind, topic)
    if result.could_not_start:
        # The same words in each row of each such launch: one cause, told once.
        reason = f'the trainer cannot run here: "{result.cause}"'
    else:
        culprit = "" if result.culprit_rank is None else f", rank {result.culprit_rank}"
        cause = f": {result.cause}" if result.cause else ""
        how = _SAID.get(result.status, result.status.words)
        reason = f"{name} {how}{culprit}{cause}"
    clue, follows = "", launch.launch.id
    if result.stopped_at and result.culprit_rank is not None:
        # Where the silent rank was, by its own stack.
        clue = f"Rank {result.culprit_rank} stopped at {', called at '.join(result.stopped_at)}."
    return Finding(
        Outcome(outcome),
        Reason(code),
        reason,
        evidence=paths,
        topic=topic,
        follows=follows,
        clue=clue,
    )


def lost_heartbeats(launch: LaunchEvidence) -> list[str]:
    """Heartbeat files that are not there, of ranks that the launcher saw end with exit code 0."""
    present = {rank.rank for rank in launch.ranks}
    return [
        f"{launch.launch.run_dir}/{HEARTBEATS.name(end.rank)}"
        for end in launch.result.ranks
        if end.code == 0 and end.rank not in present
    ]
