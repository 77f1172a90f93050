"""What the loss of a trainer of one's own tells: is it a number, does it fall, did it diverge?

Nobody tells what kind of loss it is, so that it is held against itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from phases.kit.case import Case
from phases.kit.finding import Finding, failed, incomplete, inconclusive, passed
from phases.kit.measure import log_value
from runbook.records import Reason
from runbook.records.evidence import TrainingLog

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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


def loss_problems(log: TrainingLog) -> list[str]:
    """What no loss that is finite in every row can be."""
    losses = log.frame["loss"]
    if len(losses) >= 3 and losses.nunique() == 1:
        return [f"its loss is {losses.iloc[0]:g} in each of {len(losses)} rows"]
    zeros = log.frame["zeros"]
    before = losses[(zeros > 0).cummax().eq(other=False)]
    # One that comes near 0 may be rounded to it.
    if zeros.any() and len(before) and before.iloc[-1] > _NEAR_ZERO * before.iloc[0]:
        step = int(log.frame.loc[zeros > 0, "step"].iloc[0])
        return [
            f"its loss is exactly 0 in {int(zeros.sum())} rows, the first at step {step} after "
            f"{before.iloc[-1]:.4g}: some trainers print one that is no number so (transformers "
            "without logging_nan_inf_filter=False)"
        ]
    return []


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


def diverged(losses: npt.NDArray[np.float64]) -> str:
    """How the loss diverged; empty where that is not sure. `losses` are finite, oldest first.

    Any loss may have any level, so that it is held against itself alone: every reading of the last
    quarter is above the first eighth of the run and ten times above the lowest eighth before, each
    by its median; or the loss is far above what a mean over tokens or classes can be, did not fall
    out of what it was in the first quarter, and swings by more than a factor of thirty in the last
    half. One that is 0 or less
    somewhere has no such scale.
    """
    import numpy as np

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
