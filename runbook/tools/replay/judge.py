"""From a report to every contradiction in it, and the verdict that these leave."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from runbook.records.measurement import Record
from runbook.records.outcome import Outcome, Verdict
from runbook.tools.replay.numbers import OPTIONAL_PHASES, RULES
from runbook.tools.replay.report import Report


class Contradiction(Record):
    """One breach of a rule. `claimed` is the report's word, `found` what its numbers say."""

    rule: str
    rule_text: str = Field(min_length=1)
    phase: str
    claimed: str
    found: str = Field(min_length=1)
    outcome: Outcome


class ReplayRecord(Record):
    """What a replayed report amounts to."""

    title: str
    source: str
    claimed_verdict: str
    verdict: Verdict
    contradictions: tuple[Contradiction, ...]


def judge_report(report: Report) -> ReplayRecord:
    """Judge a report's own numbers by the rules of a run."""
    found = tuple(
        Contradiction(
            rule=name,
            rule_text=rule.text,
            phase=one.phase,
            claimed=one.claimed or "nothing",
            found=one.found,
            outcome=one.outcome or rule.outcome,
        )
        for name, rule in RULES.items()
        for one in rule.breaches(report)
    )
    return ReplayRecord(
        title=report.title,
        source=report.source,
        claimed_verdict=report.claimed_verdict,
        verdict=verdict_of(found),
        contradictions=found,
    )


def verdict_of(found: Sequence[Contradiction]) -> Verdict:
    """NO-GO if a rule FAILs outside the optional phases, GO if none is broken, else INCOMPLETE."""
    if any(one.outcome is Outcome.FAIL and one.phase not in OPTIONAL_PHASES for one in found):
        return Verdict.NO_GO
    return Verdict.INCOMPLETE if found else Verdict.GO
