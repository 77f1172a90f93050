"""Where a report lacks what it has to contain: rows, phases, configs, provenance. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from runbook.records.outcome import Outcome
from runbook.stats.decision import Decided
from runbook.stats.launches import meets_target
from runbook.tools.replay import PHASE_NAMES, Report, Span, Status

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


FORM: Mapping[str, Find] = {
    "acceptance.throughput": _throughput,
    "acceptance.config": _another_config,
    "acceptance.rows": _rows_missing,
    "acceptance.value": _scored_value,
    "claim.not_passed": _own_words,
    "phase.not_passed": _not_passed,
    "config.sequential_prefill": _sequential_prefill,
    "window.no_provenance": _no_provenance,
}
