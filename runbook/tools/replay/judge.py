"""What the numbers of a report can bear, its contradictions, and the verdict that these leave.

Windows, means, winners, controls and the machine: these rules join those of `rules` in RULES. The
sentence of each, and what a breach amounts to, are in `configs/rules/replay.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import harmonic_mean
from typing import NamedTuple

import numpy as np
from pydantic import Field

from runbook.config import IDLE_MFU
from runbook.files import shipped_data
from runbook.records.measurement import Record
from runbook.records.outcome import Outcome, Verdict
from runbook.stats import Decided, Decision
from runbook.stats.arms import MIN_ROUNDS, judge_rounds
from runbook.stats.launches import MOST_SCALING, STALE_BELOW, scaling
from runbook.tools.replay import FORM, OPTIONAL_PHASES, Breach, Find, Report, Result, Span, rates

# A healthy trainer is at this share of the peak or above; below IDLE_MFU the machine idles.
HEALTHY_MFU = 0.20
# Equal, and apart, as rates of one machine are.
SAME, APART = 0.03, 0.10


def _few_rows(report: Report) -> Iterator[Breach]:
    for name, table in report.phases.items():
        if short := [line for line in table.results if 0 < len(line.rows) < report.window_rows]:
            counts = sorted({len(line.after_first) for line in short})
            arms = ", ".join(line.arm or line.config for line in short)
            shown = " or ".join(map(str, counts))
            found = f"{arms}: {shown} log rows after the first, not {report.window_rows} steps"
            yield Breach(name, table.claim, found)


def _means_of_rates(report: Report) -> Iterator[Breach]:
    for name, table in report.phases.items():
        for line in table.results:
            values = line.after_first
            if line.stated_mean is None or len(values) < 2:
                continue
            plain, honest = sum(values) / len(values), harmonic_mean(values)
            if abs(line.stated_mean / plain - 1) < 0.002 and plain / honest - 1 > SAME:
                found = f"{line.arm}: mean of the rates {values[0]:g} to {values[-1]:g};"
                found += f" tokens / time gives {honest:.0f}"
                yield Breach(name, f"mean {line.stated_mean:g}", found)


def _choice_not_shown(report: Report) -> Iterator[Breach]:
    for name in ("bucket_sweep", "fused_adamw"):
        table = report.table(name)
        asked = table.chosen or name not in OPTIONAL_PHASES
        if table.status != "completed" or not asked:
            continue
        decision, wins = _choice_of(table.results)
        settled = decision.winner is not None or decision.outcome is Decided.TIE
        if not (settled and wins == table.chosen):
            ranked = sorted(report.measured(name), key=_pace, reverse=True)
            spans = "; ".join(f"{line.arm}: {rates(span)}" for line, span in ranked)
            found = f"inside the noise ({spans} tok/s after step 1): {decision.reason}"
            yield Breach(name, f"{table.chosen or 'nothing'} is best", found)


def _pace(measured: tuple[Result, Span]) -> float:
    line, span = measured
    return harmonic_mean(line.after_first or span)


def _choice_of(results: Sequence[Result]) -> tuple[Decision, str]:
    """`judge_rounds` on the launches, or on all rows that the arms have in common as rounds.

    Rows are no blocks in random order, so that is generous: what is no winner here is none. The
    arm that may be chosen comes with it: after a TIE the configured one, empty if undecided.
    """
    launches = [line.launches for line in results]
    if len(results) > 1 and min(map(len, launches)) == max(map(len, launches)) > 0:
        values = np.array(launches, dtype=np.float64).T
    else:
        steps = sorted(set.intersection(*(set(line.rows) for line in results)) if results else ())
        rounds = [[line.rows[step] for line in results] for step in steps]
        values = np.array(rounds, dtype=np.float64)
        if len(results) < 2 or len(steps) < MIN_ROUNDS:
            values = np.ones((len(steps), max(len(results), 2)))
    decision = judge_rounds([line.arm for line in results], values, error=0.01)
    kept = next((line.arm for line in results if line.control), "")
    return decision, decision.winner or (kept if decision.outcome is Decided.TIE else "")


def _against_own_rule(report: Report) -> Iterator[Breach]:
    table = report.table("fused_adamw")
    base = next((line for line in table.results if line.control), None)
    variant = next((line for line in table.results if not line.control), None)
    if not table.chosen or base is None or variant is None or not (base.rows and variant.rows):
        return
    before, after = (sum(line.rows.values()) / len(line.rows) for line in (base, variant))
    by_rule, sign = (variant.arm, ">=") if after >= before else (base.arm, "<")
    if by_rule != table.chosen:
        found = f"by the stated rule {by_rule} wins on the rows shown: mean {after:.1f} of"
        found += f" {variant.arm} {sign} {before:.1f} of {base.arm} ({len(base.rows)} rows each:"
        yield Breach("fused_adamw", table.claim, f"{found} no rule can decide on them)")


def _controls(report: Report) -> Iterator[Breach]:
    spans = [span for _, span in report.measured("baseline")]
    for name, table in report.phases.items() if spans else ():
        for line in table.results:
            if not line.control or not line.after_first:
                continue
            pace = harmonic_mean(line.after_first)
            if all(pace < low * (1 - APART) or pace > high * (1 + APART) for low, high in spans):
                found = f"arm {line.arm} has the baseline's settings and ran at {pace:.0f} tok/s"
                found += " (tokens / time after step 1); baseline phase: "
                yield Breach(name, table.claim, found + ", ".join(map(rates, spans)))


def _scaling(report: Report) -> Iterator[Breach]:
    claim = report.table("single_gpu").claim
    claimed = ", ".join(text for text in (claim, report.claims("scaling")) if text)
    pairs = [
        (one, many, *_efficiency(many, slow, fast))
        for one, slow in report.measured("single_gpu")
        for many, fast in report.measured("baseline")
        if many.config == one.config and many.devices > 1
    ]
    if not pairs:
        found = "no config was measured on one and on all devices"
        yield Breach("single_gpu", claimed, found, Outcome.INCOMPLETE)
    for one, many, least, found in pairs:
        if least > MOST_SCALING:
            yield Breach("single_gpu", claimed, found)
        elif not one.launches or len(one.launches) != len(many.launches):
            yield Breach("single_gpu", claimed, found, Outcome.INCONCLUSIVE)
        else:
            decision = scaling(one.launches, many.launches, many.devices)
            if decision.outcome is not Decided.PASS:
                outcome = decision.outcome.as_check
                yield Breach("single_gpu", claimed, decision.reason, outcome)


def _efficiency(many: Result, slow: Span, fast: Span) -> tuple[float, str]:
    """The lowest E = T_N / (N T_1), and the lowest and highest as text."""
    times = [fast[0] / slow[1], fast[1] / slow[0]]
    least, most = (value / many.devices for value in times)
    text = f"{many.config}: {rates(fast)} on {many.devices} devices against {rates(slow)} on one:"
    text += f" {times[0]:.1f} to {times[1]:.1f} times one device, E = {least:.2f} to {most:.2f}"
    return least, text


def _target(report: Report) -> Iterator[Breach]:
    target = report.acceptance.min_toks_per_s
    share = mfu(report, target)
    if share < IDLE_MFU:
        healthy = HEALTHY_MFU / mfu(report, 1.0) / report.machine.devices
        found = f"{share:.3%} of the machine's peak (MFU); a healthy trainer"
        found += f" reaches about {healthy:,.0f} tok/s per device"
        yield Breach("baseline", f"target {target:g} tok/s", found)
    best = max((high for _, (_, high) in report.measured("baseline")), default=0.0)
    if target < STALE_BELOW * best:
        found = f"{best:g} tok/s is {best / target:.0f} times the target"
        yield Breach("baseline", f"target {target:g} tok/s exceeded", found)


def _use(report: Report) -> Iterator[Breach]:
    for name, table in report.phases.items():
        rates_of = [
            (mfu(report, high, one.devices), high) for one, (_, high) in report.measured(name)
        ]
        share, rate = max(rates_of, default=(IDLE_MFU, 0.0))
        if not IDLE_MFU <= share <= 1.0:
            found = (
                f"the best rate, {rate:g} tok/s, is {share:.1%} of the peak of its devices (MFU)"
            )
            yield Breach(name, table.claim, found)


_NUMBERS: Mapping[str, Find] = {
    "window.too_few_rows": _few_rows,
    "mean.of_rates": _means_of_rates,
    "choice.not_shown": _choice_not_shown,
    "choice.against_rule": _against_own_rule,
    "control.not_reproduced": _controls,
    "scaling.not_shown": _scaling,
    "target.too_low": _target,
    "plausible.mfu": _use,
}


class Rule(NamedTuple):
    """A rule in one sentence, what a breach of it amounts to, and where a report breaks it."""

    text: str
    outcome: Outcome
    breaches: Find


RULES = {
    name: Rule(one["text"], Outcome[one["outcome"]], {**FORM, **_NUMBERS}[name])
    for name, one in shipped_data("rules/replay").items()
}


def mfu(report: Report, toks_per_s: float, devices: int = 0) -> float:
    """Share of the peak of so many devices (0: all), at 6 FLOPs per parameter and token.

    Attention is left out.
    """
    peak = (devices or report.machine.devices) * report.machine.peak_tflops * 1e12
    return toks_per_s * 6 * report.model.parameters / peak


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
