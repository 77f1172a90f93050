"""Numbers that cannot be are INVALID, however good they look."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from phases.common.case import Case
from phases.common.finding import Finding, invalid, passed
from phases.common.measure import log_value
from runbook.evidence import LaunchEvidence, TrainingLog
from runbook.records import Reason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "FLOOR_SLACK",
    "RATE_TOLERANCE",
    "START_TOLERANCE",
    "check_plausible",
    "loss_problems",
    "time_problems",
    "token_problems",
]

# A fresh model predicts about uniformly, so its first loss is near ln(vocabulary). Wide enough for
# any sane initialisation, narrow enough to see a resumed or a wrong model.
START_TOLERANCE = 0.15
# Least slack under the loss floor, in nats: sampling noise of a mean over a window.
FLOOR_SLACK = 0.01
# toks_per_s is written with finite digits.
RATE_TOLERANCE = 0.01
_WINDOW = 50


def check_plausible(case: Case, name: str) -> Finding:
    """PASS if loss, tokens and times are possible, else INVALID with everything that is not."""
    log, launch, env = case.log(name), case.launch(name), case.env(name)
    effective = env.get("effective") or {}
    problems = [
        *token_problems(log, effective, _planned(launch), stopped=_stopped_early(launch)),
        *time_problems(log, launch.result.duration_s),
        *loss_problems(log, effective),
    ]
    value = log_value(log, "loss_first", float(log.frame["loss"].iloc[0]), "nats", rows=(0, 0))
    paths = (log.path, launch.env_path)
    if problems:
        reason = f"{name}: {'; '.join(problems)}"
        return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value, evidence=paths)
    floor = _number(effective.get("loss_floor"))
    total = f"{int(log.frame['tokens'].sum())} tokens in {len(log.frame)} steps"
    reason = f"first loss {value.value:.3f}, floor {floor:.3f}, {total}"
    return passed(reason, measurement=value, evidence=paths)


def _planned(launch: LaunchEvidence) -> int:
    """Steps that the attempt that counts was asked for: a retry may be shorter."""
    asked = launch.result.steps
    return launch.launch.steps if asked is None else asked


def _stopped_early(launch: LaunchEvidence) -> bool:
    """Fewer rows than planned are right where an arm was refused, or enough was known."""
    return any(rank.counts.get("enough") or rank.arm_failures for rank in launch.ranks)


def token_problems(
    log: TrainingLog, effective: dict[str, Any], planned: int, *, stopped: bool = False
) -> list[str]:
    """Rows and tokens against steps x global batch x S; fewer rows only after an early stop."""
    if "tokens" not in log.frame:
        return [f"{log.path} has no column tokens"]
    problems, rows = [], len(log.frame)
    per_step = effective.get("tokens_per_step")
    product = math.prod(
        int(effective.get(key) or 0) for key in ("seq_len", "global_batch", "accumulation")
    )
    if per_step != product:
        problems.append(f"tokens per step {per_step}, but S x batch x accumulation is {product}")
    total = int(log.frame["tokens"].sum())
    if per_step and total != rows * per_step:
        problems.append(f"{total} tokens in {rows} steps, expected {rows * per_step}")
    if rows != planned and not (stopped and rows < planned):
        problems.append(f"{rows} rows for {planned} steps")
    return problems


def time_problems(log: TrainingLog, duration_s: float) -> list[str]:
    """Step times are positive, give the rates beside them, and fit into the launch."""
    if "dt_s" not in log.frame:
        return [f"{log.path} has no column dt_s"]
    dt = log.frame["dt_s"].to_numpy(dtype=float)
    if not bool((dt > 0).all()):
        return ["a step took no time"]
    problems = []
    rates = log.frame["tokens"].to_numpy(dtype=float) / dt
    shown = log.frame["toks_per_s"].to_numpy(dtype=float)
    off = abs(shown / rates - 1.0) > RATE_TOLERANCE
    if bool(off.any()):
        step = int(log.frame["step"].to_numpy()[off][0])
        problems.append(f"toks_per_s is not tokens / dt_s at step {step}")
    if duration_s > 0 and float(dt.sum()) > duration_s:
        problems.append(f"steps sum to {dt.sum():.1f} s in a launch of {duration_s:.1f} s")
    return problems


def loss_problems(log: TrainingLog, effective: dict[str, Any]) -> list[str]:
    """The loss starts near ln(vocabulary) and its mean never falls below the data's floor."""
    losses = log.frame["loss"].to_numpy(dtype=float)
    vocabulary = int(effective.get("vocab_size") or 0)
    if vocabulary < 2:
        return ["env.json names no vocabulary size"]
    if not bool((abs(losses) < math.inf).all()):
        return ["the loss is not finite in every step"]
    problems, start = [], math.log(vocabulary)
    if not abs(losses[0] / start - 1.0) <= START_TOLERANCE:
        problems.append(f"first loss {losses[0]:.3f}, far from ln({vocabulary}) = {start:.3f}")
    floor = effective.get("loss_floor")
    if floor is not None:
        problems += _floor_problems(losses, float(floor))
    return problems


def _floor_problems(losses: npt.NDArray[np.float64], floor: float) -> list[str]:
    """A mean over the last window below the floor by more than its noise: the future was seen."""
    last = losses[-_WINDOW:]
    noise = 4.0 * float(last.std()) / math.sqrt(len(last))
    mean = float(last.mean())
    if mean < floor - max(FLOOR_SLACK, noise):
        return [
            f"mean loss {mean:.3f} of the last {len(last)} steps is below the floor {floor:.3f}"
        ]
    return []


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
