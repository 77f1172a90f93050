"""A report's contradictions: what it lacks, what its numbers cannot bear, and the verdict left.

The sentence of each rule, and what a breach amounts to, are in `configs/rules/replay.yaml`. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from pydantic import Field

from runbook.config.limits import IDLE_MFU
from runbook.files import shipped_data
from runbook.records.measurement import Record
from runbook.records.outcome import Outcome, Verdict
from runbook.stats.arms import MIN_ROUNDS, judge_rounds
from runbook.stats.decision import Decided, Decision
from runbook.stats.launches import MOST_SCALING, STALE_BELOW, meets_target, scaling
from runbook.tools.replay import PHASE_NAMES, Report, Result, Span, Status

# What the runbook leaves optional, and what its own acceptance table has: G2 and L1.
OPTIONAL_PHASES = ("fused_adamw", "fineweb")
ACCEPTANCE_ROWS = (
    "throughput", "v2_parity", "compression", "bucket_sweep", "scaling", "sdpa_audit", "long_run",
)  # fmt: skip
# A number that is written twice may be rounded.
NEAR = 0.01


class Breach(NamedTuple):
    """Where a rule is broken: the report's word and what its numbers say.

    `outcome` is what it amounts to where that is not the same for all breaches of the rule.
    """

    phase: str
    claimed: str
    found: str
    outcome: Outcome | None = None


Find = Callable[[Report], Iterator[Breach]]


def _throughput(report: Report) -> Iterator[Breach]:
    config, floor = report.acceptance.config, report.acceptance.min_toks_per_s
    claimed = report.claims("throughput")
    lines = [(line, span) for line, span in report.measured("baseline") if line.config == config]
    if not lines:
        warm = any(line.config == config for line in report.table("baseline").results)
        found = f"{config}: {'only warm-up rows' if warm else 'not measured'}"
        yield Breach("baseline", claimed, found, Outcome.INCOMPLETE)
    for line, span in lines:
        text = f"{config}: {rates(span)} tok/s, floor {floor:g}"
        worst, best = (meets_target(line.launches or [rate], floor) for rate in span)
        if best.outcome is Decided.FAIL:
            yield Breach("baseline", claimed, text)
        elif worst.outcome is not Decided.PASS:
            why = f"{text}; {worst.reason}"
            yield Breach("baseline", claimed, why, Outcome.INCONCLUSIVE)


def _another_config(report: Report) -> Iterator[Breach]:
    wanted = report.acceptance.config
    for row in report.scored:
        if row.row == "throughput" and row.config and row.config != wanted:
            seen, asked = report.configs[row.config], report.configs[wanted]
            value = f" {row.value:g} tok/s" if row.value else ""
            found = f"measured on {row.config} ({seen}), asked for {wanted} ({asked})"
            yield Breach("baseline", f"{row.claim}{value}", found)


def _rows_missing(report: Report) -> Iterator[Breach]:
    there = {row.row for row in report.scored}
    for name in dict.fromkeys((*ACCEPTANCE_ROWS, *report.acceptance.rows)):
        if name not in there:
            found = f"the acceptance table has no row {name}"
            yield Breach("acceptance", report.claimed_verdict, found)


def _scored_value(report: Report) -> Iterator[Breach]:
    for row in report.scored:
        if row.row != "throughput" or row.value is None:
            continue
        config = row.config or report.acceptance.config
        spans = [span for line, span in report.measured("baseline") if line.config == config]
        if not any(low * (1 - NEAR) <= row.value <= high * (1 + NEAR) for low, high in spans):
            measured = ", ".join(map(rates, spans)) or "nothing"
            claimed = f"{row.claim} {row.value:g} tok/s"
            yield Breach("baseline", claimed, f"measured on {config}: {measured}")


_FAILING = (
    r"fail(?:s|ed|ing|ures?)?|nans?|infs?|infinite|non-?finite|diverg(?:ed|es|ing)|crash(?:ed|es)?|"
    r"hangs?|hung|hanging|oom|out of memory|errors?|abort(?:ed|s)?|killed|broken|no-?go|"
    r"exceptions?|not met|unmet|missed|did not (?:pass|reach|finish|complete)|timed? ?out"
)
_FAILED = re.compile(rf"(?<![\w.])(?:{_FAILING})(?!\w)", re.IGNORECASE)
# "no NaN", "0 failures", "without errors" say the opposite.
_DENIED = re.compile(
    rf"(?<![\w.])(?:no|not|0|zero|without(?: any)?|never)[ -](?:{_FAILING})(?!\w)", re.IGNORECASE
)
_PENDING = re.compile(
    r"(?<!\w)(?:pending|partial(?:ly)?|deferred|skipped|todo|tbd|incomplete|conditional(?:ly)?"
    r"|not (?:run|done|tested|measured)|unknown|n/a)(?!\w)",
    re.IGNORECASE,
)


def _own_words(report: Report) -> Iterator[Breach]:
    said = [("acceptance", report.claimed_verdict)]
    said += [("acceptance", f"{row.row}: {row.claim}") for row in report.scored]
    said += [(name, table.claim) for name, table in report.phases.items()]
    for phase, words in said:
        if found := _FAILED.search(_DENIED.sub("", words)):
            yield Breach(phase, words, f"it says {found[0]!r} itself", Outcome.FAIL)
        elif phase == "acceptance" and (found := _PENDING.search(words)):
            yield Breach(phase, words, f"it says {found[0]!r} itself")


def _not_passed(report: Report) -> Iterator[Breach]:
    for name in PHASE_NAMES:
        table = report.table(name)
        if table.status is not Status.COMPLETED and name not in OPTIONAL_PHASES:
            outcome = Outcome.FAIL if table.status is Status.CRASHED else None
            yield Breach(name, table.claim, table.status.value.replace("_", " "), outcome)
        if table.failed:
            yield Breach(name, table.claim, f"{', '.join(table.failed)} failed", Outcome.FAIL)
        if table.not_run:
            yield Breach(name, table.claim, f"no result of {', '.join(table.not_run)}")


def _sequential_prefill(report: Report) -> Iterator[Breach]:
    used = {line.config for table in report.phases.values() for line in table.results}
    longest = max((report.configs[name].seq_len for name in used if name), default=0)
    if longest >= 1024 and report.env.get("NSA_PREFILL_BATCHED") != "1":
        yield Breach("baseline", "", f"S={longest} without NSA_PREFILL_BATCHED=1")


def _no_provenance(report: Report) -> Iterator[Breach]:
    lines = [line for table in report.phases.values() for line in table.results]
    if bare := [line for line in lines if not (line.csv and line.window)]:
        found = f"{len(bare)} of them name no CSV file and window"
        yield Breach("all", f"{len(lines)} throughput results", found)


def rates(span: Span) -> str:
    """One rate, or a range of them."""
    low, high = span
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


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
            plain, honest = sum(values) / len(values), tokens_over_time(values)
            if abs(line.stated_mean / plain - 1) < 0.002 and plain / honest - 1 > SAME:
                found = f"{line.arm}: mean of the rates {values[0]:g} to {values[-1]:g};"
                found += f" tokens / time gives {honest:.0f}"
                yield Breach(name, f"mean {line.stated_mean:g}", found)


def _choice_not_shown(report: Report) -> Iterator[Breach]:
    for name in ("bucket_sweep", "fused_adamw"):
        table = report.table(name)
        asked = table.chosen or name not in OPTIONAL_PHASES
        if table.status is not Status.COMPLETED or not asked:
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
    return tokens_over_time(line.after_first or span)


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
            pace = tokens_over_time(line.after_first)
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


def _same_at_both_lengths(report: Report) -> Iterator[Breach]:
    lines = [(line, span) for line, span in report.measured("baseline") if line.config]
    for (one, (low, high)), (other, (low2, high2)) in combinations(lines, 2):
        a, b = report.configs[one.config], report.configs[other.config]
        alike = (a.batch, a.accumulation, one.devices) == (b.batch, b.accumulation, other.devices)
        near = low2 <= high * (1 + SAME) and low <= high2 * (1 + SAME)
        if a.seq_len != b.seq_len and alike and near and mfu(report, max(high, high2)) < IDLE_MFU:
            claimed = f"S={a.seq_len} and S={b.seq_len} both {report.table('baseline').claim}"
            found = f"{rates((low, high))} tok/s at S={a.seq_len} and {rates((low2, high2))} at"
            found += f" S={b.seq_len}, same batch: was the sequence length in force?"
            yield Breach("baseline", claimed, found)


_FINDS: Mapping[str, Find] = {
    "acceptance.throughput": _throughput,
    "acceptance.config": _another_config,
    "acceptance.rows": _rows_missing,
    "acceptance.value": _scored_value,
    "claim.not_passed": _own_words,
    "phase.not_passed": _not_passed,
    "config.sequential_prefill": _sequential_prefill,
    "window.no_provenance": _no_provenance,
    "window.too_few_rows": _few_rows,
    "mean.of_rates": _means_of_rates,
    "choice.not_shown": _choice_not_shown,
    "choice.against_rule": _against_own_rule,
    "control.not_reproduced": _controls,
    "scaling.not_shown": _scaling,
    "target.too_low": _target,
    "plausible.mfu": _use,
    "plausible.sequence_length": _same_at_both_lengths,
}


class Rule(NamedTuple):
    """A rule in one sentence, what a breach of it amounts to, and where a report breaks it."""

    text: str
    outcome: Outcome
    breaches: Find


RULES = {
    name: Rule(one["text"], Outcome[one["outcome"]], _FINDS[name])
    for name, one in shipped_data("rules/replay").items()
}


def tokens_over_time(values: Sequence[float]) -> float:
    """Throughput of rows with equal tokens: their harmonic mean."""
    return len(values) / math.fsum(1 / value for value in values)


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
