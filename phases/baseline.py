"""Baseline DDP throughput: the number that decides go or no-go."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nsa.contract import COMPRESSION_LINE, proof_text
from phases.compare import rates
from phases.kit import fixed_rules, specs
from phases.kit.case import Case
from phases.kit.commands import repeated
from phases.kit.finding import Finding, failed, inconclusive, invalid, passed, skipped, warned
from phases.kit.measure import derived, in_file, rank_value, shown_only
from phases.kit.rows import Row, RowPhase
from phases.machine.samples import balance, headroom, utilisation
from phases.training import require_sound, toggles_row, training_rows
from phases.training.as_planned import effect_problem
from phases.training.plausible import alike
from runbook.config.registry import Judgement, PlanContext
from runbook.errors import listed
from runbook.folder.facts import device_facts, env_facts, other_work, unlike
from runbook.records import Launch, Reason
from runbook.records.evidence import AcceptedRun, AcceptedRuns
from runbook.stats import Decision
from runbook.stats.launches import LEVEL_RUNS, below_level, loss_shown

_COMPRESS = "NSA_DDP_COMPRESS"
_NAMED = 3


class Baseline(RowPhase):
    """Requirements B1 to B13."""

    name = "baseline"
    order = 20
    title = "Baseline DDP throughput"
    source = "requirements B1 to B13"
    question = "Does the production config reach the throughput that the plan needs?"
    fixed = fixed_rules("baseline")
    reads = ("preflight",)
    remembers = True
    limits = specs(
        "throughput", "throughput_aim_low", "throughput_aim_high", "accepted_loss",
        "mfu_floor", "mfu_of_ceiling", "gpu_utilisation", "gpu_imbalance",
        "memory_headroom", "flaky_launches",
    )  # fmt: skip

    def plan(self, context: PlanContext) -> list[Launch]:
        """The profile's launches of its steps, or one long one (`--protocol single`)."""
        return repeated(context, phase=self.name, purpose="throughput of the production config")

    def rows(self) -> Sequence[Row]:
        """The runbook's baseline judgements."""
        each, together = self.row.each, self.row.together
        return (
            *training_rows(self.names),
            together("comparable", alike),
            toggles_row(self.names, but=(_COMPRESS,)),
            each("compression", _compression),
            together("throughput", rates.throughput),
            together("against_last_accepted", _against_last),
            together("against_best_accepted", _against_best),
            together("throughput_aim", rates.aim),
            together("target_fresh", rates.stale_target),
            together("mfu", rates.mfu),
            together("mfu_of_ceiling", rates.mfu_of_ceiling),
            together("gpu_utilisation", utilisation),
            together("gpu_balance", balance),
            each("memory_headroom", headroom),
            together("production_time", rates.production_days),
        )

    def details(self, case: Case) -> Judgement:
        """The throughput of every launch, by the last-50 statistic (W3) and by tokens over time."""
        names = self.names(case)
        return rates.shown(
            case,
            names,
            title="Throughput of each launch",
            floor=rates.marks(case.limit("throughput"), "floor"),
            curves=rates.losses(case, names[0]),
        )


def _compression(case: Case, name: str) -> Finding:
    """PASS if it is proven and logged as `[ddp] gradient compression enabled: TYPE`."""
    launch = case.completed(name)
    wanted = launch.launch.env.get(_COMPRESS, "off")
    if wanted == "off":
        return skipped(Reason.NOT_ASKED_FOR, f"{name} was planned with {_COMPRESS}=off")
    line = f"{COMPRESSION_LINE}{wanted}"
    problems = [effect_problem(launch, _COMPRESS, wanted)]
    if not any(line in text for text in launch.console_lines):
        problems.append(f"the log has no line {line!r}")
    found = [problem for problem in problems if problem]
    paths = (launch.path("console"), *(rank.path for rank in launch.ranks[:1]))
    if found:
        return invalid(Reason.NO_EFFECT, f"{name}: {'; '.join(found)}", evidence=paths)
    proof = next(effect for effect in launch.effects(_COMPRESS) if effect.took_effect)
    value = rank_value(launch.ranks[0], "gradient_compression", wanted)
    return passed(
        f"{line!r} logged; {proof_text(proof.evidence)}", measurement=value, evidence=paths
    )


# -- the third floor: what this machine was accepted with, by the last run and by the best level ---


def _against_last(case: Case, names: Sequence[str]) -> Finding:
    """Is a loss against the last accepted run shown, over the launches of both?"""

    kept, runs = _comparable(case, names)
    last = runs[-1]
    _refuse_damaged(kept, after=last.run_id)
    head = [float(rate.value) for rate in rates.launch_rates(case, names)]
    decision = loss_shown(last.rates, head, allowance=_allowance(case))
    differs = _differs(case, names[0], last)
    text = f"against {last.run_id} (run.json {last.run_sha256[:12]}{differs}): {decision.reason}"
    return _against(case, names, kept, decision, text)


def _against_best(case: Case, names: Sequence[str]) -> Finding:
    """Is a loss against the best level of the last accepted runs shown, a run as one value?"""

    kept, runs = _comparable(case, names)
    _refuse_damaged(kept)
    if len(runs) < LEVEL_RUNS:
        reason = f"{len(runs)} accepted run(s) of this configuration and machine; {LEVEL_RUNS} "
        raise skipped(Reason.NO_ACCEPTED_RUN, f"{reason}make a level")
    history = [statistics.geometric_mean(run.rates) for run in runs]
    head = float(rates.pooled_rate(case, names).value)
    decision = below_level(history, head, allowance=_allowance(case))
    return _against(case, names, kept, decision, f"against the best level held: {decision.reason}")


def _allowance(case: Case) -> float:
    """The limit as the share that a loss may have; a limit of no loss is a hair above none."""
    return min(max(case.limit("accepted_loss").value, 1e-6), 0.999)


def _comparable(case: Case, names: Sequence[str]) -> tuple[AcceptedRuns, list[AcceptedRun]]:
    """The accepted runs of this work and machine; raises where there is none."""
    require_sound(case, names)
    kept = case.evidence.accepted
    if kept is not None and kept.problem:
        found = invalid(Reason.DAMAGED_ARTIFACT, kept.problem, evidence=(kept.path,))
        raise found
    mine = env_facts(case.env(names[0]))
    runs = [run for run in (kept.runs if kept else ()) if not other_work(run.by_name, mine)]
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
            f"read, or not as it was written: {listed(found, _NAMED, between='; ')}"
        )
        raise invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=(kept.path,), topic="earlier_run")


def _differs(case: Case, name: str, last: AcceptedRun) -> str:
    """What is not the same as then, though it is compared: code, software, cards."""
    launch = case.launch(name)
    mine = env_facts(case.env(name)) | device_facts(launch.devices_before)
    found = [f"{one.what} {one.a} -> {one.b}" for one in unlike(last.by_name, mine)]
    return f"; differs: {listed(found, _NAMED)}" if found else ""


def _against(
    case: Case, names: Sequence[str], kept: AcceptedRuns, decision: Decision, text: str
) -> Finding:
    ratio, bounds = decision.estimate, decision.interval
    if ratio is None or bounds is None:
        raise inconclusive(Reason.TOO_FEW_SAMPLES, text, evidence=(kept.path,))
    limit = case.limit("accepted_loss")
    pooled = rates.pooled_rate(case, names)
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
    if not limit.gated:
        return shown_only(value, limit, text)
    # The bound decides, not the estimate: a loss that is not shown is none that is known.
    if not limit.holds(1.0 - bounds[1]):
        return failed(Reason.ABOVE_LIMIT, text, measurement=value, limit=limit)
    if not limit.holds(float(value.value)):
        return warned(text, measurement=value, topic="regression")
    return passed(text, measurement=value, limit=limit)
