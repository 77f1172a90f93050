"""A contradiction: what a report says, what its own numbers say, and the rule between them."""

from __future__ import annotations

from pydantic import Field

from runbook.records._base import Record
from runbook.records.outcome import Outcome

__all__ = ["RULES", "Contradiction", "contradiction"]

# Each rule in one sentence, with where it comes from.
RULES: dict[str, str] = {
    "acceptance.throughput": "the acceptance config must reach the floor (seed 000, Acceptance)",
    "acceptance.config": "the acceptance row is measured on the config that the runbook names,"
    " not on a friendlier one",
    "acceptance.row_missing": "no required row can vanish from the acceptance table",
    "phase.not_completed": "a phase that timed out, crashed, was cut off or was not run is a row,"
    " and never passed",
    "phase.part_not_run": "skipped, not reported or not collected is not passed",
    "parity.failed": "one failing pattern is a failed parity test",
    "window.too_few_rows": "a mean is taken over the last 50 steps; too few rows are"
    " INCONCLUSIVE, never silently fewer (seed 000, Bucket Sweep)",
    "window.warmup_only": "the first row holds initialisation; it is no throughput",
    "window.no_receipt": "every throughput number states its CSV path and window"
    " (seed 000, Notes & Hygiene)",
    "mean.of_rates": "throughput is tokens / time; never average rates",
    "sweep.winner_not_shown": "a WINNER beats every other arm at the family error of 1 % over"
    " randomised blocks; else TIE and the configured value stays",
    "choice.against_rule": "keep the variant if its mean is not below the baseline's"
    " (seed 000, Fused AdamW)",
    "control.not_reproduced": "a control arm that does not reproduce the baseline phase makes the"
    " comparison INVALID",
    "scaling.impossible": "scaling above 1.05 is not possible: something was not compared like"
    " for like",
    "scaling.claim": "an INVALID comparison supports no claim about scaling",
    "mfu.target": "a target must be able to catch a fault: a healthy trainer uses 20 to 40 % of"
    " the machine's peak",
    "mfu.measured": "throughput must be plausible for the machine: below 1 % of its peak"
    " something is broken, whatever the target says",
    "target.stale": "a target under half of what is measured is stale: it can catch nothing",
    "plausible.sequence_length": "equal tokens / s at two sequence lengths, far below the"
    " machine's peak, is implausible: overhead per step would give the longer one more",
    "config.sequential_prefill": "at S >= 1024 NSA_PREFILL_BATCHED=1 must be set"
    " (seed 000, Notes & Hygiene)",
}


class Contradiction(Record):
    """One breach of a rule. `claimed` is the report's word, `found` what its numbers say."""

    rule: str
    rule_text: str = Field(min_length=1)
    phase: str
    claimed: str
    found: str = Field(min_length=1)
    outcome: Outcome


def contradiction(
    rule: str, phase: str, *, claimed: str, found: str, outcome: Outcome
) -> Contradiction:
    """A breach of one of RULES."""
    return Contradiction(
        rule=rule,
        rule_text=RULES[rule],
        phase=phase,
        claimed=claimed or "nothing",
        found=found,
        outcome=outcome,
    )
