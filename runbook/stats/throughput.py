"""Which rows of a log count, the documented last-50 statistic, and those that decisions rest on.

One of them is tokens per second of processor time: what a busy machine disturbs far less than the
clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runbook.records import Measurement, Window
from runbook.records.evidence import Column, Frame, RankLog, TrainingLog
from runbook.records.measurement import TOKENS_PER_SECOND, Source
from runbook.stats import MAD_TO_SIGMA, FloatArray

# Steps whose median must be usual where warm-up ends: a single quick step ends nothing.
_RUN = 5
_FEWEST_STEPS = 4


def warmup_cut(dt_s: FloatArray) -> int:
    """How many leading steps are warm-up: at least one, at most a quarter; none of under four.

    The usual pace is the median of the second half. Warm-up ends before the first step that is
    not slower than it (by 10 %, or by three robust deviations if that is more), as is the median
    of the five steps from there on. A pause later in the run moves nothing: only the beginning is
    searched, and medians are compared.
    """
    n = len(dt_s)
    if n < _FEWEST_STEPS:
        return 0
    # Never more than a quarter: what is still slow there is the run, not its warm-up, and has to
    # stay visible in its rate and in its trend. Only slow steps are cut for the same reason: a
    # run that begins fast has slowed down. The first step always goes, it allocates and compiles.
    most = n // 4
    later = dt_s[n // 2 :]
    pace = float(np.median(later))
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(later - pace)))
    allowed = pace + max(0.10 * pace, 3.0 * sigma)
    run = min(_RUN, n - most)
    heads = np.lib.stride_tricks.sliding_window_view(dt_s[1 : most + run], run)
    usual = (heads[:, 0] <= allowed) & (np.median(heads, axis=1) <= allowed)
    found = np.flatnonzero(usual)
    return int(found[0]) + 1 if len(found) else most


class StatisticsError(ValueError):
    """A statistic that this log cannot give."""


class WindowTooShort(StatisticsError):
    """Fewer rows than the window needs: never silently a shorter window."""

    def __init__(self, *, available: int, wanted: int, path: str) -> None:
        self.available = available
        super().__init__(
            f"{path} has {available} measured rows in the window, {wanted} are needed; "
            "run more steps, or log every step"
        )


def measured_rows(log: TrainingLog, *, arm: str | None = None) -> Frame:
    """The rows that count: warm-up rows left out, one arm if named.

    Raises `StatisticsError` if an arm is asked of a log without that column.
    """
    frame = log.frame
    need(log.path, frame, *([] if arm is None else ["arm"]))
    keep = np.ones(len(frame), dtype=bool)
    if "warmup" in frame:
        keep &= ~frame["warmup"].to_numpy(dtype=bool)
    if arm is not None:
        keep &= (frame["arm"] == arm).to_numpy(dtype=bool)
    return frame if bool(keep.all()) else frame[keep]


def need(path: str, frame: Frame, *columns: str) -> None:
    """Raise `StatisticsError` unless the file has all of them; the older form has not."""
    missing = [name for name in columns if name not in frame]
    if missing:
        raise StatisticsError(f"{path} has no column {', '.join(missing)}; only rates can be shown")


def cadence(frame: Frame) -> int:
    """Steps between two rows: 1 for a row per step, k where every k-th step was logged."""
    if len(frame) < 2:
        return 1
    return max(1, int(np.median(np.diff(frame["step"].to_numpy()))))


def measurement(
    log: TrainingLog, rows: Frame, *, name: str, value: float, unit: str, stdev: float | None = None
) -> Measurement:
    """A measurement over these rows of this log."""
    return Measurement(
        name=name,
        value=value,
        unit=unit,
        n=len(rows),
        window=Window(
            # Not first and last row: in a damaged log they can be in the wrong order.
            first_step=int(rows["step"].min()),
            last_step=int(rows["step"].max()),
        ),
        path=log.path,
        sha256=log.sha256,
        stdev=stdev,
    )


def last_window(log: TrainingLog, *, n: int = 50, arm: str | None = None) -> Measurement:
    """Mean and population standard deviation of `toks_per_s` over the last `n` steps.

    This is the documented statistic (requirement W3). The window is counted in
    steps: of a log with a row per k steps only the rows of the last `n` steps could count, which
    are fewer than `n`. Raises `WindowTooShort` then, and `StatisticsError` without the rate.
    """
    need(log.path, log.frame, "step", "toks_per_s")
    rows = measured_rows(log, arm=arm)
    if len(rows) and cadence(log.frame) > 1:
        steps = rows["step"].to_numpy()
        rows = rows[steps > steps[-1] - n]
    if len(rows) < n:
        raise WindowTooShort(available=len(rows), wanted=n, path=log.path)
    rows = rows.iloc[-n:]
    rates = rows["toks_per_s"].to_numpy(dtype=np.float64)
    return measurement(
        log,
        rows,
        name=_named(f"toks_per_s_last{n}", arm),
        value=float(np.mean(rates)),
        stdev=float(np.std(rates)),
        unit=TOKENS_PER_SECOND,
    )


def typical(log: TrainingLog) -> Measurement:
    """Mean tokens of a step over the median step time: what the run does when nothing pauses it.

    The automatic warm-up cut applies unless the log marks its warm-up rows itself.
    Raises `WindowTooShort` if no row is left, `StatisticsError` for the older form.
    """
    rows = _steady_rows(log)
    rate = float(rows["tokens"].mean()) / float(rows["dt_s"].median())
    return measurement(log, rows, name="toks_per_s_typical", value=rate, unit=TOKENS_PER_SECOND)


def effective(log: TrainingLog, *, arm: str | None = None) -> Measurement:
    """All tokens over all time: sum(tokens) / sum(dt), pauses included, warm-up excluded.

    Raises as `typical`.
    """
    rows = _steady_rows(log, arm=arm)
    name = _named("toks_per_s_effective", arm)
    rate = float(rows["tokens"].sum()) / float(rows["dt_s"].sum())
    return measurement(log, rows, name=name, value=rate, unit=TOKENS_PER_SECOND)


def block_throughputs(log: TrainingLog) -> Frame:
    """Tokens over time of each block, as `arm` (str), `block` (int), `value` (tok/s).

    A block that was cut short (fewer measured rows than the longest) is no sample and is left
    out. Raises `StatisticsError` for a log without arms.
    """
    need(log.path, log.frame, "arm", "block", "tokens", "dt_s")
    rows = measured_rows(log)
    sums = rows.groupby(["block", "arm"], sort=True).agg(
        tokens=("tokens", "sum"), dt_s=("dt_s", "sum"), rows=("step", "size")
    )
    whole = sums[sums["rows"] == sums["rows"].max()] if len(sums) else sums
    result = whole.reset_index()
    result["value"] = result["tokens"] / result["dt_s"]
    return result[["arm", "block", "value"]]


def block_step_times(log: TrainingLog, rounds: Frame) -> FloatArray:
    """Seconds of every measured step of whole blocks, [rounds, arms, steps].

    `rounds` are complete rounds of `block_throughputs`; arms in their order of appearance there,
    rounds by number.
    """
    rows = measured_rows(log)
    times = {key: part["dt_s"].to_numpy() for key, part in rows.groupby(["block", "arm"])}
    arms = rounds["arm"].drop_duplicates()
    blocks = sorted(rounds["block"].unique())
    return np.array([[times[block, arm] for arm in arms] for block in blocks], dtype=np.float64)


def step_times(log: TrainingLog) -> FloatArray:
    """Seconds of every measured step, warm-up rows left out (marked ones only, no cut).

    Of a row that stands for several steps, their mean.
    """
    need(log.path, log.frame, "dt_s")
    rows = measured_rows(log)
    each = rows["dt_s"] / rows["steps"] if "steps" in rows else rows["dt_s"]
    return each.to_numpy(dtype=np.float64)


def _steady_rows(log: TrainingLog, *, arm: str | None = None) -> Frame:
    need(log.path, log.frame, "step", "tokens", "dt_s")
    rows = measured_rows(log, arm=arm)
    marked = "warmup" in log.frame and bool(log.frame["warmup"].any())
    if not marked and len(rows):
        rows = rows.iloc[warmup_cut(rows["dt_s"].to_numpy(dtype=np.float64)) :]
    if not len(rows):
        raise WindowTooShort(available=0, wanted=1, path=log.path)
    if not bool((rows["dt_s"] > 0).all()):
        raise StatisticsError(f"{log.path} has step times that are not above zero seconds")
    return rows


def _named(name: str, arm: str | None) -> str:
    return name if arm is None else f"{name}[{arm}]"


TOKENS_PER_CPU_SECOND = "tok/CPU-s"
_COLUMN = "cpu_s"


def per_cpu_second(log: TrainingLog, ranks: Sequence[RankLog]) -> Measurement:
    """Mean tokens of a step over the median processor time that all ranks together spend on it.

    After the log's own warm-up cut; all threads of a rank count, other processes do not. Raises
    `StatisticsError` where a rank does not tell its processor time, or where that of any rank does
    not grow from step to step.
    """
    need(log.path, log.frame, "step", "tokens", "dt_s")
    spent = [_per_step(rank) for rank in ranks]
    if not spent:
        raise StatisticsError(f"{log.path}: no rank wrote heartbeats beside it")
    cut = warmup_cut(log.frame["dt_s"].to_numpy(dtype=np.float64))
    # A step's time is known from the end of the step before.
    rows = log.frame.iloc[max(cut, 1) :]
    seconds = np.stack([own.reindex(rows["step"]).to_numpy(dtype=np.float64) for own in spent])
    if not seconds.size or not bool((seconds > 0).all()):
        raise StatisticsError(f"{log.path}: the ranks' processor time does not grow in each step")
    value = float(rows["tokens"].mean()) / float(np.median(seconds.sum(axis=0)))
    made = measurement(
        log, rows, name="toks_per_cpu_s_typical", value=value, unit=TOKENS_PER_CPU_SECOND
    )
    window = made.window
    others = (Source(path=rank.path, sha256=rank.sha256, window=window) for rank in ranks)
    return made.model_copy(update={"others": tuple(others)})


def _per_step(rank: RankLog) -> Column:
    """Processor seconds of each step of a rank, by step."""
    steps = rank.steps
    if steps is None or _COLUMN not in steps or bool(steps[_COLUMN].isna().any()):
        raise StatisticsError(f"{rank.path} has no column {_COLUMN}; only rates can be shown")
    return steps[["step", _COLUMN]].drop_duplicates("step").set_index("step")[_COLUMN].diff()
