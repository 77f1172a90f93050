"""Rules about numbers: windows, means, winners, controls, and what a machine can do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from runbook.config.limits import IDLE_MFU
from runbook.stats.arms import MIN_ROUNDS, judge_rounds
from runbook.stats.decision import Decided, Decision
from runbook.stats.launches import MOST_SCALING, STALE_BELOW, scaling
from runbook.tools.replay.models import ReplayFile, Result
from runbook.tools.replay.rules_rows import Contradiction, contradiction, rates

# A healthy trainer is at this share of the peak or above; below IDLE_MFU the machine idles.
HEALTHY_MFU = 0.20
SAME = 0.03
APART = 0.10


def few_rows(replay: ReplayFile) -> Iterator[Contradiction]:
    """Means of log rows where a window of steps is asked for; rows of warm-up only."""
    for name, table in replay.phases.items():
        short = [line for line in table.results if 0 < len(line.rows) < replay.window_rows]
        with_rate = [line for line in short if line.after_first]
        if with_rate:
            counts = sorted({len(line.after_first) for line in with_rate})
            shown = " or ".join(map(str, counts))
            arms = ", ".join(line.arm or line.config for line in with_rate)
            yield contradiction(
                "window.too_few_rows",
                name,
                table.claim,
                f"{arms}: {shown} log rows after the first, not {replay.window_rows} steps",
            )
        for line in short:
            if not line.after_first:
                found = f"only step 1 ({line.rows[1]:g} tok/s), which is warm-up"
                yield contradiction("window.warmup_only", name, table.claim, found)


def means_of_rates(replay: ReplayFile) -> Iterator[Contradiction]:
    """A stated mean that is the mean of rates where tokens / time gives less."""
    for name, table in replay.phases.items():
        for line in table.results:
            values = line.after_first
            if line.stated_mean is None or len(values) < 2:
                continue
            plain, honest = sum(values) / len(values), tokens_over_time(values)
            stated = abs(line.stated_mean / plain - 1) < 0.002
            if stated and plain / honest - 1 > SAME:
                yield contradiction(
                    "mean.of_rates",
                    name,
                    f"mean {line.stated_mean:g}",
                    f"{line.arm}: mean of the rates {rates((values[0], values[0]))} to"
                    f" {values[-1]:g}; tokens / time gives {honest:.0f}",
                )


def winner_not_shown(replay: ReplayFile) -> Iterator[Contradiction]:
    """A best bucket that the rows do not bear out."""
    table = replay.table("bucket_sweep")
    if not table.chosen:
        return
    decision, wins = arms_decision(table.results)
    if wins == table.chosen:
        return
    usable = [line for line in table.results if line.span]
    ranked = sorted(usable, key=lambda line: -tokens_over_time(line.after_first or _span(line)))
    spans = "; ".join(f"{line.arm}: {rates(_span(line))}" for line in ranked)
    yield contradiction(
        "sweep.winner_not_shown",
        "bucket_sweep",
        f"{table.chosen} is best",
        f"inside the noise ({spans} tok/s after step 1; one launch per arm, no blocks):"
        f" {decision.reason}",
    )


def arms_decision(results: Sequence[Result]) -> tuple[Decision, str]:
    """`best_arm` on the launches, or on all rows that the arms have in common as rounds.

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


def against_own_rule(replay: ReplayFile) -> Iterator[Contradiction]:
    """The optimizer choice against the rule that the runbook states for it."""
    table = replay.table("fused_adamw")
    base = next((line for line in table.results if line.control), None)
    variant = next((line for line in table.results if not line.control), None)
    if not table.chosen or base is None or variant is None or not (base.rows and variant.rows):
        return
    means = [sum(line.rows.values()) / len(line.rows) for line in (base, variant)]
    by_rule = variant.arm if means[1] >= means[0] else base.arm
    if by_rule != table.chosen:
        sign = ">=" if means[1] >= means[0] else "<"
        yield contradiction(
            "choice.against_rule",
            "fused_adamw",
            table.claim,
            f"by the stated rule {by_rule} wins on the rows shown: mean {means[1]:.1f} of"
            f" {variant.arm} {sign} {means[0]:.1f} of {base.arm} ({len(base.rows)} rows each:"
            " no rule can decide on them)",
        )


def controls(replay: ReplayFile) -> Iterator[Contradiction]:
    """Arms with the baseline's settings that run at another pace than any baseline result."""
    spans = [line.span for line in replay.results("baseline") if line.span]
    if not spans:
        return
    for name, table in replay.phases.items():
        for line in table.results:
            if not line.control or not line.after_first:
                continue
            pace = tokens_over_time(line.after_first)
            if all(pace < low * (1 - APART) or pace > high * (1 + APART) for low, high in spans):
                shown = ", ".join(rates(span) for span in spans)
                yield contradiction(
                    "control.not_reproduced",
                    name,
                    table.claim,
                    f"arm {line.arm} has the baseline's settings and ran at {pace:.0f} tok/s"
                    f" (tokens / time after step 1); baseline phase: {shown}",
                )


def impossible_scaling(replay: ReplayFile) -> Iterator[Contradiction]:
    """Several devices at more than that many times one device; and the claim built on it."""
    found = efficiency(replay)
    if found is None or found[0] <= MOST_SCALING:
        return
    low, high, text = found
    devices = replay.machine.devices
    yield contradiction(
        "scaling.impossible",
        "single_gpu",
        replay.table("single_gpu").claim,
        f"{text}: {low * devices:.1f} to {high * devices:.1f} times one device,"
        f" E = {low:.2f} to {high:.2f}",
    )
    for row in replay.scored:
        if row.row == "scaling":
            yield contradiction(
                "scaling.claim",
                "single_gpu",
                f"near-linear scaling: {row.claim}",
                "the only comparison there is is INVALID",
            )


def efficiency(replay: ReplayFile) -> tuple[float, float, str] | None:
    """Lowest and highest E = T_N / (N T_1) of one config measured on one and on all devices."""
    for single in replay.results("single_gpu"):
        for many in replay.results("baseline"):
            if many.config == single.config and many.span and single.span and many.devices > 1:
                low = many.span[0] / single.span[1] / many.devices
                high = many.span[1] / single.span[0] / many.devices
                text = f"{many.config}: {rates(many.span)} on {many.devices} devices against"
                return low, high, f"{text} {rates(single.span)} on one"
    return None


def paired_scaling(replay: ReplayFile) -> Decision | None:
    """`scaling` of one config launched in pairs; None if the report has no such launches."""
    for single in replay.results("single_gpu"):
        for many in replay.results("baseline"):
            alike = many.config == single.config and many.devices > 1
            if alike and many.launches and len(many.launches) == len(single.launches):
                return scaling(single.launches, many.launches, many.devices)
    return None


def low_use(replay: ReplayFile) -> Iterator[Contradiction]:
    """The target as a share of what the machine can do, and of what it did."""
    target = replay.acceptance.min_toks_per_s
    healthy = HEALTHY_MFU / mfu(replay, 1.0) / replay.machine.devices
    if mfu(replay, target) < IDLE_MFU:
        yield contradiction(
            "mfu.target",
            "baseline",
            f"target {target:g} tok/s",
            f"{mfu(replay, target):.3%} of the machine's peak (MFU); a healthy trainer"
            f" reaches about {healthy:,.0f} tok/s per device",
        )
    best = _best(replay)
    if best and target < STALE_BELOW * best:
        yield contradiction(
            "target.stale",
            "baseline",
            f"target {target:g} tok/s exceeded",
            f"{best:g} tok/s is {best / target:.0f} times the target",
        )


def impossible_use(replay: ReplayFile) -> Iterator[Contradiction]:
    """Measured rates of any phase that no machine in order gives, or no machine at all."""
    for name, table in replay.phases.items():
        shares = [
            (mfu(replay, line.span[1], line.devices), line.span[1])
            for line in table.results
            if line.span
        ]
        if not shares:
            continue
        share, rate = max(shares)
        if share < IDLE_MFU:
            found = f"the best rate, {rate:g} tok/s, is {share:.1%} MFU"
            yield contradiction("mfu.measured", name, table.claim, found)
        elif share > 1.0:
            found = f"{rate:g} tok/s is {share:.1%} of the peak of its devices"
            yield contradiction("mfu.impossible", name, table.claim, found)


def same_at_both_lengths(replay: ReplayFile) -> Iterator[Contradiction]:
    """Equal throughput at two sequence lengths of a machine that idles."""
    lines = [line for line in replay.results("baseline") if line.config and line.span]
    for index, one in enumerate(lines):
        for other in lines[index + 1 :]:
            a, b = replay.configs[one.config], replay.configs[other.config]
            alike = (a.batch, a.accumulation, one.devices)
            if a.seq_len == b.seq_len or alike != (b.batch, b.accumulation, other.devices):
                continue
            (low, high), (low2, high2) = _span(one), _span(other)
            near = low2 <= high * (1 + SAME) and low <= high2 * (1 + SAME)
            if near and mfu(replay, max(high, high2)) < IDLE_MFU:
                both = f"S={a.seq_len} and S={b.seq_len} both"
                yield contradiction(
                    "plausible.sequence_length",
                    "baseline",
                    f"{both} {replay.table('baseline').claim}",
                    f"{rates((low, high))} tok/s at S={a.seq_len} and {rates((low2, high2))}"
                    f" at S={b.seq_len}, same batch: was the sequence length in force?",
                )


def tokens_over_time(values: Sequence[float]) -> float:
    """Throughput of rows with equal tokens: their harmonic mean."""
    return len(values) / math.fsum(1 / value for value in values)


def mfu(replay: ReplayFile, toks_per_s: float, devices: int = 0) -> float:
    """Share of the peak of so many devices (0: all), at 6 FLOPs per parameter and token.

    Attention is left out.
    """
    peak = (devices or replay.machine.devices) * replay.machine.peak_tflops * 1e12
    return toks_per_s * 6 * replay.model.parameters / peak


def _best(replay: ReplayFile) -> float | None:
    return max((line.span[1] for line in replay.results("baseline") if line.span), default=None)


def _span(line: Result) -> tuple[float, float]:
    if line.span is None:
        raise ValueError(f"{line.arm or line.config}: only warm-up rows, no throughput")
    return line.span


NUMBER_RULES = (
    few_rows,
    means_of_rates,
    winner_not_shown,
    against_own_rule,
    controls,
    impossible_scaling,
    low_use,
    impossible_use,
    same_at_both_lengths,
)
