"""Are two launches alike in everything except what is being compared?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa.toggles import TOGGLES
from phases.kit import FLOOR_SLACK, LOSS_MOST, RATE_TOLERANCE, START_TOLERANCE, table
from phases.kit.case import Case, once
from phases.kit.finding import Finding, incomplete, invalid, passed
from phases.kit.measure import log_value
from phases.training.own import own_plausible
from runbook.folder import facts
from runbook.folder.launch.documents import recorded_toggles
from runbook.records import Reason
from runbook.records.evidence import LaunchEvidence, TrainingLog
from runbook.stats import FloatArray

# So many steps on different data cannot all have the same loss.
_ALIKE = 3
# Steps at the end whose mean loss is judged.
LOSS_WINDOW = 50


@once
def check_plausible(case: Case, name: str) -> Finding:
    """PASS if loss, tokens and times are possible, else INVALID with everything that is not."""
    if case.profile.own_trainer:
        return own_plausible(case, name)
    log, launch, env = case.log(name), case.launch(name), case.env(name)
    if other := other_checkpoint(launch, env):
        # Its steps are others than planned, and that says nothing about the model.
        reason = f"{name}: {other}"
        paths = (log.path, launch.path("env"))
        return invalid(Reason.MISMATCH, reason, evidence=paths, topic="resume")
    effective = env.get("effective") or {}
    # Fewer rows than planned are right where an arm was refused, or enough was known.
    stopped = any(rank.counts.get("enough") or rank.arm_failures for rank in launch.ranks)
    problems = [
        *step_problems(log, after=launch.after),
        *token_problems(log, effective, launch.asked - launch.after, stopped=stopped),
        *time_problems(log, launch.result.duration_s),
        *loss_problems(log, effective, fresh=not launch.after),
    ]
    value = log_value(log, "loss_first", float(log.frame["loss"].iloc[0]), "nats", rows=(0, 0))
    paths = (log.path, launch.path("env"))
    if problems:
        reason = f"{name}: {'; '.join(problems)}"
        return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value, evidence=paths)
    floor = effective.get("loss_floor", math.nan)
    total = f"{int(log.frame['tokens'].sum())} tokens in {len(log.frame)} steps"
    reason = f"first loss {value.value:.3f}, floor {floor:.3f}, {total}"
    return passed(reason, measurement=value, evidence=paths)


def other_checkpoint(launch: LaunchEvidence, env: Mapping[str, Any]) -> str:
    """How what it went on from is not the checkpoint that it was told; empty where it is."""
    begun, found = launch.result.begun, env.get("resumed") or {}
    if begun is None or found.get("sha256") == begun.sha256:
        return ""
    step, path = found.get("step"), str(found.get("path", "none")).rstrip("/")
    text = (
        f"it went on from step {step} ({'/'.join(path.split('/')[-3:])}), and not from the "
        f"checkpoint of step {begun.step} that this run wrote ({begun.path})"
    )
    refused = [str(one) for one in found.get("refused") or ()]
    return f"{text}; refused: {', '.join(refused)}" if refused else text


def step_problems(log: TrainingLog, *, after: int) -> Iterator[str]:
    """The rows are steps 1, 2, 3 and so on; of a resumed launch the ones after its checkpoint."""
    for row, step in enumerate(log.frame["step"].tolist(), start=1):
        if step != after + row:
            yield f"row {row} is step {int(step)}: steps are missing or added"
            return


def token_problems(
    log: TrainingLog, effective: dict[str, Any], planned: int, *, stopped: bool
) -> Iterator[str]:
    """Rows and tokens against steps x global batch x S; fewer rows only after an early stop."""
    rows, per_step = len(log.frame), effective.get("tokens_per_step")
    product = math.prod(
        int(effective.get(key) or 0) for key in ("seq_len", "global_batch", "accumulation")
    )
    if per_step != product:
        yield f"tokens per step {per_step}, but S x batch x accumulation is {product}"
    total = int(log.frame["tokens"].sum())
    if per_step and total != rows * per_step:
        yield f"{total} tokens in {rows} steps, expected {rows * per_step}"
    if rows != planned and not (stopped and rows < planned):
        yield f"{rows} rows for {planned} steps"


def time_problems(log: TrainingLog, duration_s: float) -> Iterator[str]:
    """Step times give the rates beside them, and fit into the launch."""
    dt = log.frame["dt_s"].to_numpy(dtype=float)
    rates = log.frame["tokens"].to_numpy(dtype=float) / dt
    shown = log.frame["toks_per_s"].to_numpy(dtype=float)
    off = abs(shown / rates - 1.0) > RATE_TOLERANCE
    if bool(off.any()):
        step = int(log.frame["step"].to_numpy()[off][0])
        yield f"toks_per_s is not tokens / dt_s at step {step}"
    if duration_s > 0 and float(dt.sum()) > duration_s:
        yield f"steps sum to {dt.sum():.1f} s in a launch of {duration_s:.1f} s"


def loss_problems(log: TrainingLog, effective: dict[str, Any], *, fresh: bool) -> Iterator[str]:
    """The loss starts near ln(vocabulary) and its mean never falls below the data's floor.

    A model that is not `fresh` starts anywhere below.
    """
    losses = log.frame["loss"].to_numpy(dtype=float)
    vocabulary = int(effective.get("vocab_size") or 0)
    if vocabulary < 2:
        yield "env.json has no vocabulary size"
        return
    if not bool((abs(losses) < math.inf).all()):
        yield "the loss is not finite in every step"
        return
    start = math.log(vocabulary)
    if len(losses) >= _ALIKE and len(set(losses.tolist())) == 1:
        yield f"the loss is {losses[0]} in each of {len(losses)} steps"
    odd = losses[(losses < 0) | (losses > LOSS_MOST * start)]
    if len(odd):
        at = int((losses == odd[0]).argmax())
        step = int(log.frame["step"].iloc[at])
        yield f"the loss is {odd[0]:g} at step {step}, which no cross-entropy can be"
    if fresh and not abs(losses[0] / start - 1.0) <= START_TOLERANCE:
        yield f"first loss {losses[0]:.3f}, far from ln({vocabulary}) = {start:.3f}"
    floor = effective.get("loss_floor")
    if floor is not None:
        yield from _floor_problems(losses, float(floor))


def _floor_problems(losses: FloatArray, floor: float) -> Iterator[str]:
    """A mean over the last window below the floor by more than its noise: the future was seen."""
    last = losses[-LOSS_WINDOW:]
    noise = 4.0 * float(last.std()) / math.sqrt(len(last))
    mean = float(last.mean())
    if mean < floor - max(FLOOR_SLACK, noise):
        yield f"mean loss {mean:.3f} of the last {len(last)} steps is below the floor {floor:.3f}"


def mfu_of(env: Mapping[str, Any], toks_per_s: float, peak_tflops: float | None) -> float | None:
    """Share of all ranks' peak at this rate: rate x FLOPs per token / (peak x ranks).

    None where no peak is known or env.json has no FLOPs per token.
    """
    per_token = (env.get("effective") or {}).get("model_flops_per_token") or 0.0
    if peak_tflops is None or not per_token > 0:
        return None
    return toks_per_s * per_token / (peak_tflops * 1e12 * int(env.get("world_size") or 1))


def differences(
    left: Mapping[str, Any], right: Mapping[str, Any], *, but: Sequence[str] = ()
) -> list[str]:
    """`key: left against right` for every fact in which two env.json files differ.

    `but` names keys that may differ, because they are what is compared.
    """
    skip = {*table("alike")["but"], *but}
    return [
        f"{key}: {one!r} against {other!r}"
        for key, one, other in facts.differences(_facts(left), _facts(right))
        if key not in skip
    ]


def alike(case: Case, names: Sequence[str], *, but: Sequence[str] = ()) -> Finding:
    """PASS if all launches ran the same thing on the same machine, else INVALID with the keys."""
    if not names:
        return incomplete(Reason.NOT_RUN, "no launch was planned")
    found = {name: case.env(name) for name in names}
    paths = [case.launch(name).path("env") for name in names]
    first = names[0]
    for name in names[1:]:
        unlike = differences(found[first], found[name], but=but)
        if unlike:
            reason = f"{first} and {name} are not comparable: {'; '.join(unlike)}"
            return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
    if copied := _copied(case, names):
        return invalid(Reason.NOT_PLAUSIBLE, copied, evidence=paths)
    without = [name for name, env in found.items() if not env.get("config_sha256")]
    if without:
        reason = f"no config digest in env.json of {', '.join(without)}"
        return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
    what = "one launch" if len(names) == 1 else f"{len(names)} launches of one config"
    return passed(f"{what}, one checkout and one machine", evidence=paths)


def _copied(case: Case, names: Sequence[str]) -> str:
    """The first file of one launch that is also another launch's, or an empty string."""
    seen: dict[str, str] = {}
    for name in names:
        launch = case.launch(name)
        log = launch.training
        files = [(rank.sha256, rank.path) for rank in launch.ranks]
        files += [(log.sha256, log.path)] if log is not None else []
        for sha256, path in files:
            if seen.setdefault(sha256, path) != path:
                return f"{seen[sha256]} and {path} are the same file: one launch was copied"
    return ""


def _facts(env: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in table("alike")["launches"]:
        value: Any = env
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found[key] = value
    given = recorded_toggles(env)
    for name, toggle in TOGGLES.items():
        if toggle.reader == "trainer" and (
            not toggle.passive or name in table("alike")["take_time"]
        ):
            found[f"toggles.{name}"] = given.get(name, toggle.default)
    return found
