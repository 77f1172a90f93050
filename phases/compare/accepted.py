"""The third floor: what this machine was accepted with, by the last run and by the best level."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phases.compare.rates import launch_rates, pooled_rate
from phases.kit.case import (
    Case,
    Finding,
    failed,
    inconclusive,
    invalid,
    listed,
    passed,
    skipped,
    warned,
)
from phases.kit.limits import ACCEPTED_LOSS
from phases.kit.measure import derived, in_file, shown_only
from phases.training.training import require_sound
from runbook.folder.facts import device_facts, env_facts, other_work, unlike
from runbook.records import Reason
from runbook.records.evidence import AcceptedRun, AcceptedRuns
from runbook.stats.decision import Decision
from runbook.stats.levels import LEVEL_RUNS, below_level, loss_shown

_NAMED = 3


def against_last(case: Case, names: Sequence[str]) -> Finding:
    """Is a loss against the last accepted run shown, over the launches of both?"""

    kept, runs = _comparable(case, names)
    last = runs[-1]
    _refuse_damaged(kept, after=last.run_id)
    head = [float(rate.value) for rate in launch_rates(case, names)]
    decision = loss_shown(last.rates, head, allowance=_allowance(case))
    differs = _differs(case, names[0], last)
    text = f"against {last.run_id} (run.json {last.run_sha256[:12]}{differs}): {decision.reason}"
    return _finding(case, names, kept, decision, text)


def against_best(case: Case, names: Sequence[str]) -> Finding:
    """Is a loss against the best level of the last accepted runs shown, a run as one value?"""

    kept, runs = _comparable(case, names)
    _refuse_damaged(kept)
    if len(runs) < LEVEL_RUNS:
        reason = f"{len(runs)} accepted run(s) of this configuration and machine; {LEVEL_RUNS} "
        raise skipped(Reason.NO_ACCEPTED_RUN, f"{reason}make a level")
    history = [math.exp(math.fsum(map(math.log, run.rates)) / len(run.rates)) for run in runs]
    head = float(pooled_rate(case, names).value)
    decision = below_level(history, head, allowance=_allowance(case))
    return _finding(case, names, kept, decision, f"against the best level held: {decision.reason}")


def _allowance(case: Case) -> float:
    """The limit as the share that a loss may have; a limit of no loss is a hair above none."""
    return min(max(case.limit(ACCEPTED_LOSS).value, 1e-6), 0.999)


def _comparable(case: Case, names: Sequence[str]) -> tuple[AcceptedRuns, list[AcceptedRun]]:
    """The accepted runs of this work and machine; raises where there is none."""
    require_sound(case, names)
    kept = case.evidence.accepted
    if kept is not None and kept.problem:
        found = invalid(Reason.DAMAGED_ARTIFACT, kept.problem, evidence=(kept.path,))
        raise found
    mine = env_facts(case.env(names[0]))
    runs = [run for run in (kept.runs if kept else ()) if not other_work(run.facts, mine)]
    if kept is not None and not runs:
        _refuse_damaged(kept)
    if kept is None or not runs:
        refused = [f"{name}: {why}" for name, why in (kept.left_out if kept else {}).items()]
        more = f" (not taken: {'; '.join(refused[:_NAMED])})" if refused else ""
        reason = f"no earlier run of this configuration and machine was GO{more}"
        paths = (kept.path,) if kept else ()
        raise skipped(Reason.NO_ACCEPTED_RUN, reason, evidence=paths)
    return kept, runs


def _refuse_damaged(kept: AcceptedRuns, *, after: str = "") -> None:
    """Raise INVALID if a run later than `after` was accepted, or may have been, and is damaged.

    A level that nobody can read is no level that was held, and not the same as none.
    """
    found = [f"{name}: {why}" for name, why in kept.damaged.items() if name > after]
    if found:
        reason = (
            "what this machine was accepted with is not known, because an earlier run cannot be "
            f"read, or not as it was written: {listed(found, _NAMED)}"
        )
        raise invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(kept.path,), topic="earlier_run")


def _differs(case: Case, name: str, last: AcceptedRun) -> str:
    """What is not the same as then, though it is compared: code, software, cards."""
    launch = case.launch(name)
    mine = env_facts(case.env(name)) | device_facts(launch.devices_before)
    found = [f"{one.what} {one.a} -> {one.b}" for one in unlike(last.facts, mine)]
    more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return f"; differs: {', '.join([*found[:_NAMED], *more])}" if found else ""


def _finding(
    case: Case, names: Sequence[str], kept: AcceptedRuns, decision: Decision, text: str
) -> Finding:
    ratio, bounds = decision.estimate, decision.interval
    if ratio is None or bounds is None:
        raise inconclusive(Reason.TOO_FEW_SAMPLES, text, evidence=(kept.path,))
    limit = case.limit(ACCEPTED_LOSS)
    pooled = pooled_rate(case, names)
    value = derived(
        pooled,
        name="accepted_loss",
        value=1.0 - ratio,
        unit="",
        n=decision.n,
        interval=(1.0 - bounds[1], 1.0 - bounds[0]),
        note="loss as a share; below zero: a gain",
        also=[pooled, in_file(kept.path, kept.sha256, "accepted", float(len(kept.runs)))],
    )
    if not case.gates_throughput(limit):
        return shown_only(value, limit, text)
    # The bound decides, not the estimate: a loss that is not shown is none that is known.
    if not limit.holds(1.0 - bounds[1]):
        return failed(Reason.ABOVE_LIMIT, text, measurement=value, limit=limit)
    if not limit.holds(float(value.value)):
        return warned(text, measurement=value, topic="regression")
    return passed(text, measurement=value, limit=limit)
