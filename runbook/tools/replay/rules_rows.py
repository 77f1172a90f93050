"""Rules about what a report has to contain: configs, phases, rows, provenance."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field

from runbook.records.measurement import Record
from runbook.records.outcome import Outcome
from runbook.stats.decision import Decided
from runbook.stats.launches import meets_target
from runbook.tools.replay.models import PHASE_NAMES, ReplayFile, Status

# Each rule in one sentence, with the requirement of docs/spec.md that it serves.
RULES: dict[str, str] = {
    "acceptance.throughput": "the acceptance config must reach the floor (B3)",
    "acceptance.config": "the acceptance row is measured on the config that the runbook names,"
    " not on a friendlier one",
    "acceptance.row_missing": "no required row can vanish from the acceptance table",
    "acceptance.asks_less": "GO needs every row of the runbook's own acceptance table (G2, L1)",
    "acceptance.value": "the acceptance row states what was measured on its config",
    "claim.failed": "what a report itself calls failed has not passed",
    "claim.pending": "what is pending, partial, deferred or skipped has not passed",
    "phase.not_completed": "a phase that timed out, crashed, was cut off or was not run is a row,"
    " and never passed",
    "phase.part_not_run": "skipped, not reported or not collected is not passed",
    "parity.failed": "one failing pattern is a failed parity test",
    "window.too_few_rows": "a mean is taken over the last 50 steps; too few rows are"
    " INCONCLUSIVE, never silently fewer (W3)",
    "window.warmup_only": "the first row holds initialization; it is no throughput",
    "window.no_provenance": "every throughput number states its CSV path and window (G7)",
    "mean.of_rates": "throughput is tokens / time; never average rates",
    "sweep.winner_not_shown": "a WINNER beats every other arm at the family error of 1 % over"
    " randomized blocks; else TIE and the configured value stays",
    "choice.against_rule": "keep the variant if its mean is not below the baseline's (F2)",
    "control.not_reproduced": "a control arm that does not reproduce the baseline phase makes the"
    " comparison INVALID",
    "scaling.impossible": "scaling above 1.05 is not possible: something was not compared like"
    " for like",
    "scaling.claim": "an INVALID comparison supports no claim about scaling",
    "mfu.target": "a target must be able to catch a fault: a healthy trainer uses 20 to 40 % of"
    " the machine's peak",
    "mfu.measured": "throughput must be plausible for the machine: below 1 % of its peak"
    " something is broken, whatever the target says",
    "mfu.impossible": "no machine does more than its peak",
    "target.stale": "a target under half of what is measured is stale: it can catch nothing",
    "plausible.sequence_length": "equal tok/s at two sequence lengths, far below the"
    " machine's peak, is implausible: overhead per step would give the longer one more",
    "config.sequential_prefill": "at S >= 1024 NSA_PREFILL_BATCHED=1 must be set (E1)",
}


class Contradiction(Record):
    """One breach of a rule. `claimed` is the report's word, `found` what its numbers say."""

    rule: str
    rule_text: str = Field(min_length=1)
    phase: str
    claimed: str
    found: str = Field(min_length=1)
    outcome: Outcome


# What a breach amounts to: a comparison that says nothing, unless the rule is about evidence.
_OUTCOMES = {
    "acceptance.throughput": Outcome.FAIL,
    "acceptance.row_missing": Outcome.INCOMPLETE,
    "acceptance.asks_less": Outcome.INCOMPLETE,
    "claim.failed": Outcome.FAIL,
    "claim.pending": Outcome.INCOMPLETE,
    "phase.not_completed": Outcome.INCOMPLETE,
    "phase.part_not_run": Outcome.INCOMPLETE,
    "parity.failed": Outcome.FAIL,
    "window.too_few_rows": Outcome.INCONCLUSIVE,
    "window.warmup_only": Outcome.INCOMPLETE,
    "window.no_provenance": Outcome.INCOMPLETE,
    "sweep.winner_not_shown": Outcome.INCONCLUSIVE,
    "choice.against_rule": Outcome.INCONCLUSIVE,
}


def contradiction(
    rule: str, phase: str, claimed: str, found: str, *, failed: bool = False
) -> Contradiction:
    """A breach of one of RULES; `failed`: the phase itself went wrong, so FAIL."""
    return Contradiction(
        rule=rule,
        rule_text=RULES[rule],
        phase=phase,
        claimed=claimed or "nothing",
        found=found,
        outcome=Outcome.FAIL if failed else _OUTCOMES.get(rule, Outcome.INVALID),
    )


# What the runbook's own acceptance table has: requirements G2 and L1.
ACCEPTANCE_ROWS = (
    "throughput",
    "v2_parity",
    "compression",
    "bucket_sweep",
    "scaling",
    "sdpa_audit",
    "long_run",
)
# A number that is written twice may be rounded.
NEAR = 0.01
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

OPTIONAL_PHASES = ("fused_adamw", "fineweb")


def below_floor(replay: ReplayFile) -> Iterator[Contradiction]:
    """The acceptance config against the floor."""
    floor = replay.acceptance.min_toks_per_s
    claims = [row.claim for row in replay.scored if row.row == "throughput"]
    for result in replay.results("baseline"):
        if result.config != replay.acceptance.config or result.span is None:
            continue
        if meets_target([result.span[1]], floor).outcome is Decided.FAIL:
            yield contradiction(
                "acceptance.throughput",
                "baseline",
                ", ".join(claims),
                f"{result.config}: {rates(result.span)} tok/s, floor {floor:g}",
            )


def scored_elsewhere(replay: ReplayFile) -> Iterator[Contradiction]:
    """A throughput row that was measured on another config."""
    wanted = replay.acceptance.config
    for row in replay.scored:
        if row.row == "throughput" and row.config and row.config != wanted:
            seen, asked = replay.configs[row.config], replay.configs[wanted]
            value = f" {row.value:g} tok/s" if row.value else ""
            yield contradiction(
                "acceptance.config",
                "baseline",
                f"{row.claim}{value}",
                f"measured on {row.config} ({seen}), asked for {wanted} ({asked})",
            )


def rows_missing(replay: ReplayFile) -> Iterator[Contradiction]:
    """Rows that the acceptance table must have."""
    there = {row.row for row in replay.scored}
    for name in replay.acceptance.rows:
        if name not in there:
            yield contradiction(
                "acceptance.row_missing",
                "acceptance",
                replay.claimed_verdict,
                f"the acceptance table has no row {name}",
            )


def asks_less(replay: ReplayFile) -> Iterator[Contradiction]:
    """An acceptance table that leaves out what the runbook asks for."""
    if left_out := [name for name in ACCEPTANCE_ROWS if name not in replay.acceptance.rows]:
        yield contradiction(
            "acceptance.asks_less",
            "acceptance",
            replay.claimed_verdict,
            f"the acceptance does not ask for {', '.join(left_out)}",
        )


def scored_value(replay: ReplayFile) -> Iterator[Contradiction]:
    """A throughput in the acceptance table that no result of its config gives."""
    for row in replay.scored:
        config = row.config or replay.acceptance.config
        spans = [
            one.span for one in replay.results("baseline") if one.config == config and one.span
        ]
        if row.row != "throughput" or row.value is None:
            continue
        if not any(low * (1 - NEAR) <= row.value <= high * (1 + NEAR) for low, high in spans):
            measured = ", ".join(map(rates, spans)) or "nothing"
            yield contradiction(
                "acceptance.value",
                "baseline",
                f"{row.claim} {row.value:g} tok/s",
                f"measured on {config}: {measured}",
            )


def own_words(replay: ReplayFile) -> Iterator[Contradiction]:
    """What the report itself calls failed or pending, whatever stands beside it."""
    said = [("acceptance", replay.claimed_verdict)]
    said += [("acceptance", f"{row.row}: {row.claim}") for row in replay.scored]
    said += [(name, table.claim) for name, table in replay.phases.items()]
    for phase, words in said:
        if found := _FAILED.search(_DENIED.sub("", words)):
            yield contradiction("claim.failed", phase, words, f"it says {found[0]!r} itself")
        elif phase == "acceptance" and (found := _PENDING.search(words)):
            yield contradiction("claim.pending", phase, words, f"it says {found[0]!r} itself")


def not_completed(replay: ReplayFile) -> Iterator[Contradiction]:
    """Required phases that did not come to their end."""
    for name in PHASE_NAMES:
        status = replay.table(name).status
        if status is Status.COMPLETED or name in OPTIONAL_PHASES:
            continue
        yield contradiction(
            "phase.not_completed",
            name,
            replay.table(name).claim,
            status.value.replace("_", " "),
            failed=status is Status.CRASHED,
        )


def parts(replay: ReplayFile) -> Iterator[Contradiction]:
    """Parts of a phase that failed or were left out although it is called done."""
    for name, table in replay.phases.items():
        if table.failed:
            rule = "parity.failed" if name == "v2_parity" else "phase.not_completed"
            failed = ", ".join(table.failed)
            yield contradiction(rule, name, table.claim, f"{failed} failed", failed=True)
        if table.not_run:
            yield contradiction(
                "phase.part_not_run", name, table.claim, f"no result of {', '.join(table.not_run)}"
            )


def no_provenance(replay: ReplayFile) -> Iterator[Contradiction]:
    """Throughput numbers that nobody can trace."""
    lines = [line for table in replay.phases.values() for line in table.results]
    bare = [line for line in lines if not (line.csv and line.window)]
    if bare:
        yield contradiction(
            "window.no_provenance",
            "all",
            f"{len(lines)} throughput results",
            f"{len(bare)} of them name no CSV file and window",
        )


def sequential_prefill(replay: ReplayFile) -> Iterator[Contradiction]:
    """A long sequence without the batched prefill path."""
    used = {line.config for table in replay.phases.values() for line in table.results}
    longest = max((replay.configs[name].seq_len for name in used if name), default=0)
    if longest >= 1024 and replay.env.get("NSA_PREFILL_BATCHED") != "1":
        yield contradiction(
            "config.sequential_prefill",
            "baseline",
            "nothing",
            f"S={longest} without NSA_PREFILL_BATCHED=1",
        )


def rates(span: tuple[float, float]) -> str:
    """One rate, or a range of them."""
    low, high = span
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


ROW_RULES = (
    below_floor,
    scored_elsewhere,
    not_completed,
    rows_missing,
    asks_less,
    scored_value,
    own_words,
    parts,
    sequential_prefill,
    no_provenance,
)
