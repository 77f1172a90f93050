"""Rows about a launch that trains: what ran, whether its numbers can be, whether it lasts.

Here those of every phase with a training run: did it run, as planned, plausibly?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from phases.kit import OTHER_WORK_SHARE
from phases.kit.case import Case
from phases.kit.finding import (
    Finding,
    ending,
    failed,
    incomplete,
    inconclusive,
    invalid,
    lost_heartbeats,
    passed,
    skipped,
    warned,
)
from phases.kit.measure import file_value, log_value, rank_value
from phases.kit.rows import Row, RowsOf, ends, first_problem
from phases.machine.device_changes import device_changes
from phases.training.as_planned import as_planned, effect_problem, slow_way, toggles_in_force
from phases.training.balance import as_written, balanced, learned_from
from phases.training.own import norms_not_finite, own_ranks
from phases.training.plausible import alike, check_plausible, mfu_of
from runbook.config import IDLE_MFU
from runbook.folder.launch.documents import load_of
from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import TrainingLog


def training_rows(names: Callable[[Case], Sequence[str]]) -> tuple[Row, ...]:
    """The rows `completed` to `other_work` of a phase with training launches."""
    row = RowsOf("training", names)
    return (
        row.together("completed", _completed),
        row.each("ranks_alive", _ranks_alive),
        row.each("as_planned", as_planned),
        row.each("loss_finite", _loss_finite),
        row.each("plausible", _plausible),
        row.each("accounts", balanced),
        row.each("gradients", learned_from),
        row.each("oracle", as_written),
        row.each("devices", device_changes),
        row.each("other_work", _other_work),
    )


def _plausible(case: Case, name: str) -> Finding:
    """`check_plausible`, and INVALID where the devices would have idled.

    The second is no reason for other rows not to count: a floor that is missed stays a FAIL.
    """
    found = check_plausible(case, name)
    if case.profile.own_trainer:
        return found
    log, env = case.log(name), case.env(name)
    rate = float((log.frame["tokens"] / log.frame["dt_s"]).median())
    share = mfu_of(env, rate, case.profile.hardware.peak_tflops)
    if found.outcome is not Outcome.PASS or share is None or share >= IDLE_MFU:
        return found
    value = log_value(log, "mfu", share, "")
    reason = f"{name}: MFU {share:.3%} is under {IDLE_MFU:.0%}: at this pace the devices idle"
    return invalid(Reason.NOT_PLAUSIBLE, reason, measurement=value, evidence=found.evidence)


def _completed(case: Case, names: Sequence[str]) -> Finding:
    """PASS if all launches finished, and no more than the profile allows at a second attempt."""
    found = ends(case, names)
    if found.outcome is not Outcome.PASS:
        return found
    results = {name: case.launch(name).result for name in names}
    flaky = {name: result.cause for name, result in results.items() if result.attempts > 1}
    limit = case.limit("flaky_launches")
    if not flaky and limit.holds(0.0):
        return found
    told = "; ".join(f"{name} finished only at a second attempt ({flaky[name]})" for name in flaky)
    reason = f"FLAKY: {told or 'no launch needed a second attempt'}; allowed: {limit}"
    paths = tuple(dict.fromkeys(path for r in results.values() for path in r.evidence))
    if limit.holds(float(len(flaky))):
        return warned(reason, evidence=paths or found.evidence)
    return inconclusive(Reason.FLAKY, reason, evidence=paths or found.evidence)


def require_sound(case: Case, names: Sequence[str], *, but: Sequence[str] = ()) -> None:
    """Raise a finding unless the launches ran as planned, plausibly, alike, on healthy devices.

    A number of unlike or impossible runs is INVALID in its own row too, so that no table shows it
    as a PASS. `but` as in `differences`.
    """
    found = {
        "plausible": first_problem(check_plausible, case, names),
        "accounts": first_problem(balanced, case, names),
    }
    if case.profile.own_trainer:
        # What such a trainer cannot tell is no reason; the verdict says that it was not checked.
        found = {row: one for row, one in found.items() if one.outcome is not Outcome.SKIPPED}
    else:
        before = {"as_planned": first_problem(as_planned, case, names)}
        found = before | found | {"comparable": alike(case, names, but=but)}
    harmed = first_problem(device_changes, case, names)
    suspect = {"devices": harmed} if harmed.outcome is Outcome.INVALID else {}
    for row, finding in {**found, **suspect}.items():
        if finding.outcome is not Outcome.PASS:
            reason = f"these launches do not count: {finding.reason}"
            follows = finding.follows or f"{case.phase}.{row}"
            raise replace(finding, reason=reason, follows=follows)


def toggles_row(names: Callable[[Case], Sequence[str]], *, but: Sequence[str] = ()) -> Row:
    """Row `toggles_effective`: every toggle of the plan is proven to have done something."""

    def one(case: Case, name: str) -> Finding:
        launch = case.completed(name)
        toggles = {
            key: v for key, v in toggles_in_force(launch.launch.env).items() if key not in but
        }
        problems = [effect_problem(launch, key, value) for key, value in toggles.items()]
        found = [problem for problem in problems if problem]
        slow = [text for key in toggles if (text := slow_way(launch, key))]
        paths = [rank.path for rank in launch.ranks[:1]]
        if found:
            return invalid(Reason.NO_EFFECT, f"{name}: {'; '.join(found)}", evidence=paths)
        text = f"took effect: {', '.join(sorted(toggles)) or 'none requested'}"
        if slow and case.profile.has_gpu:
            text = f"{name}: the slow way runs, {'; '.join(slow)}; {text}"
            return warned(text, evidence=paths, topic="slow_way")
        return passed("; ".join((text, *slow)), evidence=paths)

    return RowsOf("training", names).each("toggles_effective", one)


def _other_work(case: Case, name: str) -> Finding:
    """A warning where others took more of the CPUs than `OTHER_WORK_SHARE`.

    SKIPPED where it was not recorded, or cannot be told: of a launch that was ended from here not
    all processes are known to have been its own.
    """
    launch = case.launch(name)
    load = load_of([launch.load])
    if load is None:
        why = (launch.load or {}).get("problem") or "the load was not recorded"
        return skipped(Reason.NOTHING_COLLECTED, f"{name}: {why}")
    if not launch.result.ok:
        return skipped(Reason.NOTHING_COLLECTED, f"{name} did not finish")
    value = file_value(launch, "load", "other_work", round(load.taken, 4), "of the CPUs")
    if load.taken > OTHER_WORK_SHARE:
        reason = f"{name}: {load}; more than {OTHER_WORK_SHARE:.0%} skews what is timed here"
        return warned(reason, measurement=value)
    return passed(f"{name}: {load}", measurement=value)


def _ranks_alive(case: Case, name: str) -> Finding:
    if case.profile.own_trainer:
        return own_ranks(case, name)
    launch = case.launch(name)
    wanted = launch.launch.nproc
    present = {rank.rank: rank for rank in launch.ranks}
    paths = [rank.path for rank in launch.ranks]
    fault = case.fault_of(name)
    missing = [str(rank) for rank in range(wanted) if rank not in present]
    if not present:
        reason = f"{name}: no rank wrote a heartbeat"
        return incomplete(Reason.MISSING_ARTIFACT, reason, follows=fault)
    if missing:
        reason = f"{name}: no heartbeat of rank {', '.join(missing)} of {wanted}"
        end = ending(launch)
        if end.outcome is Outcome.INCOMPLETE:  # cut off by us, perhaps before that rank began
            return incomplete(end.code, f"{reason}; {end.reason}", evidence=paths, follows=fault)
        if lost := lost_heartbeats(launch):
            told = f"{reason}, which ended with exit code 0: {', '.join(lost)} is not there"
            return incomplete(Reason.MISSING_ARTIFACT, told, evidence=paths, follows=fault)
        return failed(Reason.CRASH, reason, evidence=paths, follows=fault)
    strangers = [
        r.path
        for r in launch.ranks
        if launch.result.run_token and r.tokens - {launch.result.run_token}
    ]
    broken = [rank.path for rank in launch.ranks if rank.damaged]
    if broken:
        reason = f"{name}: {', '.join(broken)}: damaged before the end"
        return invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=broken, follows=fault)
    if strangers:
        reason = f"{', '.join(strangers)}: heartbeats of another launch"
        return invalid(Reason.DAMAGED_ARTIFACT, reason, evidence=strangers)
    case.completed(name)
    last = {rank.last_step for rank in launch.ranks}
    if len(last) > 1 or None in last:
        steps = ", ".join(f"rank {rank.rank} {rank.last_step}" for rank in launch.ranks)
        return invalid(Reason.MISMATCH, f"{name}: last steps differ: {steps}", evidence=paths)
    silent = [rank.path for rank in launch.ranks if rank.param_hash is None]
    if wanted > 1 and silent:
        reason = f"{name}: no digest of the parameters at the end of {', '.join(silent)}"
        return incomplete(Reason.MISSING_ARTIFACT, reason, evidence=silent)
    if len({rank.param_hash for rank in launch.ranks}) > 1:
        reason = f"{name}: parameters differ between ranks at the end"
        return failed(Reason.MISMATCH, reason, evidence=paths)
    reason = f"{wanted} rank(s) to step {last.pop()}, parameters equal"
    value = rank_value(launch.ranks[0], "ranks_alive", float(wanted), "ranks")
    return passed(reason, measurement=value, evidence=paths)


def _loss_finite(case: Case, name: str) -> Finding:
    log = case.log(name, ended=False, sane=False)
    launch = case.launch(name)
    losses = log.frame["loss"].to_numpy(dtype=float)
    bad = (~(abs(losses) < math.inf)).nonzero()[0].tolist()
    told = next((rank.nonfinite for rank in launch.ranks if rank.nonfinite), None)
    if bad or told:
        step = int(log.frame["step"].iloc[bad[0]]) if bad else (told or {}).get("step")
        column, what = ("loss", "loss") if bad else _told(log, step)
        rows = (log.frame["step"] == step).to_numpy().nonzero()[0][:1].tolist() * 2
        # A rank's own word counts, whatever the log says of its loss.
        number = float(log.frame[column].iloc[rows[0]]) if bad or column != "loss" else math.nan
        value = log_value(log, column, number, "nats" if column == "loss" else "", rows=rows)
        # A launch that went on, or ended otherwise, has this fault besides.
        ended = launch.result.status is LaunchStatus.NON_FINITE
        follows = launch.launch.id if ended else ""
        reason = f"{name}: the {what} is not finite at step {step}"
        return failed(Reason.NON_FINITE, reason, measurement=value, follows=follows)
    if case.profile.own_trainer and (told_of := norms_not_finite(log)):
        value = log_value(log, "grad_norm", math.nan, "")
        return failed(Reason.NON_FINITE, f"{name}: {told_of}", measurement=value)
    case.completed(name)
    # A reading of a trainer of one's own may stand for several steps.
    steps = int(log.frame["steps"].sum()) if "steps" in log.frame else len(losses)
    value = log_value(log, "loss_max", float(losses.max()), "nats", n=steps)
    read = "" if steps == len(losses) else f", read {len(losses)} times"
    if lacking := int(log.frame["missing"].sum()) if "missing" in log.frame else 0:
        first = log.frame.loc[log.frame["missing"] > 0, "step"].iloc[0]
        reason = (
            f"{name}: {log.path} lacks the loss of {lacking} of its regular rows, the first "
            f"before step {first}: a loss that is no number is often written as nothing"
        )
        return incomplete(Reason.MISSING_ARTIFACT, reason, measurement=value)
    text = f"finite in all {steps} steps{read}, highest {losses.max():.3f}"
    return passed(text, measurement=value)


def _told(log: TrainingLog, step: object) -> tuple[str, str]:
    """Column and name of what is not finite at the step at which a rank stopped for it."""
    row = log.frame[log.frame["step"] == step]
    if "grad_norm" in row and not row["grad_norm"].map(math.isfinite).all():
        return "grad_norm", "gradient norm"
    return "loss", "loss"
