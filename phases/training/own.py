"""Answers about a trainer of one's own: from its log, its processes and this program's clock.

It proves nothing by itself. Whatever needs the trainer's contract is SKIPPED and says so. What kind
of loss it is nobody tells, so that it is held against itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from phases.kit.case import Case, once
from phases.kit.finding import (
    Finding,
    failed,
    incomplete,
    inconclusive,
    invalid,
    missing,
    passed,
    skipped,
)
from phases.kit.measure import against, derived, file_value, log_value, rank_value
from phases.kit.rows import needs_contract
from phases.training.memory import projected_plateau
from runbook.records import Measurement, Outcome, Reason
from runbook.records.evidence import Frame, LaunchEvidence, TrainingLog
from runbook.records.measurement import MIB_PER_GIB, TOKENS_PER_SECOND
from runbook.records.own_trainer import OWN_PACE_TOLERANCE, PACE
from runbook.stats import FloatArray
from runbook.stats.series import FEWEST_ROWS, memory_plateau, outside_plateau
from runbook.stats.throughput import step_times, warmup_cut

# With this variable glibc gives every free block of 64 KiB and more back at once.
_NONE_KEPT = ("MALLOC_MMAP_THRESHOLD_", "65536")
# Fewer times at which the log grew do not tell how fast it went.
_GROWN = 8


def own_ranks(case: Case, name: str) -> Finding:
    """Was there a process of every rank, and did each come to the end where it tells?"""
    launch = case.completed(name)
    seen = processes_of(launch)
    wanted, last = launch.launch.nproc, launch.last_steps
    ranks = {int(rank) for rank in seen["rank"] if rank >= 0}
    ranks |= {rank for rank, step in last.items() if step is not None}
    count = float(len(ranks) or wanted == 1)
    value = file_value(launch, "processes", "ranks_seen", count, "ranks")
    if wanted > 1 and ranks != set(range(wanted)):
        told = ", ".join(map(str, sorted(ranks))) or "none"
        reason = (
            f"{name}: of ranks 0 to {wanted - 1}, {told} were seen by RANK or LOCAL_RANK in the "
            "environment of a process, or by heartbeats of their own"
        )
        return incomplete(Reason.MISSING_ARTIFACT, reason, measurement=value)
    if len(set(last.values())) > 1 or None in last.values():
        said = ", ".join(f"rank {rank} {step}" for rank, step in last.items())
        return failed(Reason.MISMATCH, f"{name}: last steps differ: {said}", measurement=value)
    told = "" if not last else f", each to step {next(iter(last.values()))} by its heartbeats"
    alike = "; whether their parameters are equal is not known"
    return passed(f"{wanted} rank(s) seen{told}{alike}", measurement=value)


def own_plausible(case: Case, name: str) -> Finding:
    """Can the log be that of this launch: its steps, its loss, its times?"""
    log, launch = case.log(name), case.launch(name)
    require_finite(case, name, invalid, Reason.NOT_PLAUSIBLE)
    problems = [*_step_problems(log, launch.launch.steps), *_loss_problems(log)]
    seconds = float(log.frame["dt_s"].sum())
    if seconds > launch.result.duration_s + 1.0:
        problems.append(f"its rows came in {seconds:.1f} s of {launch.result.duration_s:.1f} s")
    value = log_value(log, "loss_first", float(log.frame["loss"].iloc[0]), "nats", rows=(0, 0))
    if problems:
        reason = f"{name}: {'; '.join(problems)}"
        return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value)
    last = int(log.frame["step"].iloc[-1])
    reason = f"a loss from {value.value:.4g} to {log.frame['loss'].iloc[-1]:.4g} at step {last}"
    return passed(reason, measurement=value)


def _step_problems(log: TrainingLog, planned: int) -> Iterator[str]:
    steps = log.frame["step"]
    # Steps between two rows of the log, which several may have come at once.
    last, usual = int(steps.iloc[-1]), max(1, int(log.frame["steps"].min()))
    if last > planned:
        yield f"its log goes to step {last}, {planned} were asked for: does it take {{steps}}?"
    if last < planned - usual:
        yield f"its log ends at step {last} of {planned}"


def _timed(log: TrainingLog) -> tuple[int, Frame]:
    """The rows after warm-up, and where they begin; raises where the log grew too seldom."""

    cut = max(1, warmup_cut(step_times(log)))
    rows = log.frame.iloc[cut:]
    if len(rows) < _GROWN:
        reason = (
            f"{log.path} grew only {len(rows)} times after warm-up, and {_GROWN} are needed to "
            "time it: more steps (--steps-scale), or a trainer that writes each row at once"
        )
        raise inconclusive(Reason.TOO_FEW_SAMPLES, reason, evidence=(log.path,))
    return cut, rows


@once
def own_rate(case: Case, name: str) -> Measurement:
    """Tokens as the profile declares them over the time in which the log grew, after warm-up."""
    log = case.log(name)
    cut, rows = _timed(log)
    value = float(rows["tokens"].sum() / rows["dt_s"].sum())
    span = (cut, len(log.frame) - 1)
    rate = log_value(log, "toks_per_s_effective", value, TOKENS_PER_SECOND, rows=span)
    clock = rank_value(case.launch(name).ranks[0], "arrivals", float(len(rows)))
    note = "tokens as the profile declares them, by the times at which the log grew"
    return derived(rate, note=note, also=[rate, clock])


def own_accounts(case: Case, name: str) -> Finding:
    """Its own pace, where it tells one, against the times at which its log grew."""
    log = case.log(name)
    _, rows = _timed(log)
    told, seen = float(rows["told_s"].sum(skipna=False)), float(rows["dt_s"].sum())
    if not math.isfinite(told):
        reason = f"{name}: its log tells no pace, so this program's clock is the only one"
        return skipped(Reason.NEEDS_CONTRACT, reason, evidence=(log.path,))
    ratio = told / seen
    value = log_value(log, "clock_ratio", ratio, "")
    text = f"{name}: the steps took {told:.2f} s by its own pace, {seen:.2f} s by our clock"
    if abs(ratio - 1.0) > OWN_PACE_TOLERANCE:
        own = case.launch(name).launch.own
        by = next((one for one in PACE if own and one in own.log.names), "the pace")
        reason = (
            f"{text}: {by} is a wrong column (perhaps a running mean), or a wrong number of tokens "
            f"of a step, or the pauses between steps are long; without {by} in the profile's "
            "trainer.log, and without accounts in its required, nobody asks for it"
        )
        return invalid(Reason.UNBALANCED, reason, measurement=value)
    return passed(text, measurement=value)


def own_plateau(case: Case, name: str) -> Finding:
    """Of the resident memory of all its processes together, before its last row: what it saves at
    its end grows with no step. Where glibc keeps no large block that is free, what rises is held.
    """
    launch = case.completed(name)
    samples = processes_of(launch)
    samples = samples[samples["step"] < samples["step"].max()]
    sums = samples.groupby("mono").agg(step=("step", "max"), mib=("rss_mib", "sum"))
    total = sums[sums["step"] > 0].groupby("step")["mib"].max()
    if len(total) < FEWEST_ROWS:
        reason = f"memory is known after {len(total)} steps, and {FEWEST_ROWS} are needed"
        return inconclusive(Reason.TOO_FEW_SAMPLES, reason, evidence=(launch.path("processes"),))
    own = launch.launch.own
    released = own is not None and _NONE_KEPT in own.env.items()
    found = projected_plateau(
        case,
        total,
        _memory(launch, 0.0),
        who="all processes",
        ranks=launch.launch.nproc,
        decide=memory_plateau if released else outside_plateau,
    )
    if found.outcome is Outcome.PASS:
        return found
    reason = f"{found.reason} (the last step is workload.production_steps of the profile)"
    topic = "rises" if found.outcome is Outcome.INCONCLUSIVE else found.topic
    return replace(found, reason=reason, topic=topic)


def own_memory_limit(case: Case, name: str) -> Finding:
    """The largest resident memory of one process, on a CPU; nobody tells what a GPU's holds."""
    if case.profile.has_gpu:
        return needs_contract(case)
    launch = case.completed(name)
    peak = float(processes_of(launch)["rss_mib"].max())
    text = f"the largest process had {peak:.0f} MiB"
    return against(_memory(launch, peak / MIB_PER_GIB), case.limit("memory_gib"), text)


def _memory(launch: LaunchEvidence, gib: float) -> Measurement:
    count = 0 if launch.processes is None else len(launch.processes)
    return file_value(launch, "processes", "peak_memory", gib, "GiB", n=count)


def processes_of(launch: LaunchEvidence) -> Frame:
    if launch.processes is None or not len(launch.processes):
        raise missing(f"{launch.launch.name}: no process of it was seen", launch.path("processes"))
    return launch.processes


# -- its loss --------------------------------------------------------------------------------------

# Gradient norms that are not finite: fewer, or a smaller share of the rows, are steps that a scaler
# of fp16 leaves out; so are not those that go on to the end.
_FEWEST_BAD, _BAD_SHARE = 3, 0.1
# A loss that fell to this share of the first one may be printed as 0.
_NEAR_ZERO = 0.01
# Fewer readings in a quarter of them do not tell a trend.
_FEWEST = 4
# So many standard errors are no noise.
_ERRORS = 4.0
# A loss so many times above its lowest level, or that swings by such a factor, is none that learns;
# above the last no loss that is a mean over tokens or classes begins.
_DIVERGED, _WILD, _FAR_ABOVE = 10.0, 30.0, 100.0


def require_finite(case: Case, name: str, told: Callable[..., Finding], code: Reason) -> None:
    """Raise what `loss_finite` fails for, as following from that row."""
    frame = case.log(name).frame
    bad = ~(frame["loss"].abs() < math.inf)
    if bad.any():
        first = int(frame.loc[bad, "step"].iloc[0])
        reason = f"{name}: its loss is not finite in {int(bad.sum())} of {len(frame)} rows, the "
        value = log_value(case.log(name), "loss", math.nan, "nats", rows=(int(bad.argmax()),) * 2)
        follows = f"{case.phase}.loss_finite"
        raise told(code, f"{reason}first at step {first}", measurement=value, follows=follows)


def _loss_problems(log: TrainingLog) -> Iterator[str]:
    """What no loss that is finite in every row can be."""
    losses = log.frame["loss"]
    if len(losses) >= 3 and losses.nunique() == 1:
        yield f"its loss is {losses.iloc[0]:g} in each of {len(losses)} rows"
        return
    zeros = log.frame["zeros"]
    before = losses[(zeros > 0).cummax().eq(other=False)]
    # One that comes near 0 may be rounded to it.
    if zeros.any() and len(before) and before.iloc[-1] > _NEAR_ZERO * before.iloc[0]:
        step = int(log.frame.loc[zeros > 0, "step"].iloc[0])
        yield (
            f"its loss is exactly 0 in {int(zeros.sum())} rows, the first at step {step} after "
            f"{before.iloc[-1]:.4g}: some trainers print one that is no number so (transformers "
            "without logging_nan_inf_filter=False)"
        )


def norms_not_finite(log: TrainingLog) -> str:
    """Gradient norms that are not finite, beyond what the scale of fp16 makes now and then.

    Some trainers print a loss that is no number as 0, and go on.
    """
    bad, steps = log.frame["bad_norms"], log.frame["steps"]
    count = int(bad.sum())
    if count < _FEWEST_BAD or not (bad.iloc[-1] or count > _BAD_SHARE * int(steps.sum())):
        return ""
    first = int(log.frame.loc[bad > 0, "step"].iloc[0])
    zero = " and prints its loss as 0 there" if int(log.frame["zeros"].sum()) else ""
    return f"the gradient norm is not finite in {count} rows, the first at step {first}{zero}"


def own_learns(case: Case, name: str) -> Finding:
    """Is the loss of the last quarter below that of the first by more than its noise?

    By their means, or by the order of all readings (Mann and Whitney): where the loss falls a
    thousandfold in the first quarter, that fall is most of what its mean is unsure of.
    """
    from scipy.stats import mannwhitneyu, norm

    require_finite(case, name, incomplete, Reason.NON_FINITE)
    log = case.log(name)
    losses = log.frame["loss"].to_numpy(dtype=float)
    quarter = len(losses) // 4
    if quarter < _FEWEST:
        reason = f"{log.path} has {len(losses)} readings of the loss: too few to tell a trend"
        return inconclusive(Reason.TOO_FEW_SAMPLES, reason, evidence=(log.path,))
    first, last = losses[:quarter], losses[-quarter:]
    fell = float(first.mean() - last.mean())
    noise = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / quarter)
    value = log_value(log, "loss_fell", fell, "nats")
    if how := diverged(losses):
        title = f"Training diverged: the loss {how}."
        reason = f"{name}: diverged: the loss {how}"
        return failed(Reason.NOT_LEARNING, reason, measurement=value, topic="diverged", title=title)
    levels = f"from {first.mean():.4g} in the first quarter to {last.mean():.4g} in the last"
    by_order = mannwhitneyu(first, last, alternative="greater").pvalue < norm.sf(_ERRORS)
    if fell > _ERRORS * noise or (fell > 0 and by_order):
        text = f"the loss fell by {fell:.4g} from the first quarter to the last, noise {noise:.2g}"
        return passed(text, measurement=value)
    text = f"the loss went {levels}, noise {noise:.2g}"
    if fell < -_ERRORS * noise:
        return failed(Reason.NOT_LEARNING, f"it rose: {text}", measurement=value)
    text = f"{name}: it is not known to learn: {text}, of which {_ERRORS:g} times would tell"
    if losses.min() > _FAR_ABOVE:
        text = (
            f"{text}. It is never below {losses.min():.4g}, and a cross entropy of a token begins "
            "near the logarithm of the vocabulary, 4 to 13: if it is one, it diverged before the "
            f"first row, step {int(log.frame['step'].iloc[0])}"
        )
        return inconclusive(Reason.UNDECIDED, text, measurement=value, topic="diverged")
    return inconclusive(Reason.UNDECIDED, text, measurement=value)


def diverged(losses: FloatArray) -> str:
    """How the loss diverged; empty where that is not sure. `losses` are finite, oldest first.

    Any loss may have any level, so that it is held against itself alone: every reading of the last
    quarter is above the first eighth of the run and ten times above the lowest eighth before, each
    by its median; or the loss is far above what a mean over tokens or classes can be, did not fall
    out of what it was in the first quarter, and swings by more than a factor of thirty in the last
    half. One that is 0 or less
    somewhere has no such scale.
    """
    eighth, quarter = len(losses) // 8, len(losses) // 4
    if losses.min() <= 0 or eighth < _FEWEST:
        return ""
    before, last = losses[:-quarter], losses[-quarter:]
    ends = range(eighth, len(before) + 1)
    levels = [float(np.median(before[end - eighth : end])) for end in ends]
    lowest, now = min(levels), float(np.median(last))
    if last.min() > max(levels[0], _DIVERGED * lowest):
        return f"rose from {lowest:.4g} to {now:.4g} and stayed there"
    low, high = (float(one) for one in np.percentile(losses[len(losses) // 2 :], (10, 90)))
    fell = now < float(np.percentile(losses[:quarter], 10))
    if losses.min() > _FAR_ABOVE and high > _WILD * low and not fell:
        return f"swings between {low:.4g} and {high:.4g} and does not fall"
    return ""
