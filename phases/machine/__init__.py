"""Rows about the machine: checkout, host, devices, links, nodes, before and during a launch.

Here those of checkout, host and settings: another environment makes numbers INVALID. What only
skews numbers is a warning, named with its remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import gt, lt
from typing import Any

from nsa.toggles import meaning
from phases.kit import BUSY_SHARE, LONG_SEQUENCE, OTHER_WORK_SHARE, SHM_LEAST_GIB
from phases.kit.case import Case
from phases.kit.commands import environment
from phases.kit.finding import Finding, incomplete, invalid, missing, passed, skipped, warned
from phases.kit.measure import file_value
from runbook.folder.launch.documents import load_of
from runbook.records import Reason
from runbook.records.evidence import Fact


def recorded(case: Case, name: str) -> Finding:
    """PASS if the fact has a value."""
    unknown = _no_checkout(case, name)
    if unknown:
        return unknown
    value = case.known(name)
    note = f" ({value.note})" if value.note else ""
    return passed(f"{value.value}{note}", measurement=value)


def _no_checkout(case: Case, name: str) -> Finding | None:
    """An installed package belongs to no commit; only a profile with a branch forbids that."""
    fact = case.fact(name)
    if not name.startswith("git.") or fact.value is not None or case.profile.branch is not None:
        return None
    return warned(f"commit unknown: {fact.note}", evidence=(fact.path,))


def artifacts(case: Case) -> Finding:
    """The three files of requirements P2 and P3; nvidia_smi.xml only where there is a GPU."""
    wanted = {"git_sha.txt": "git.sha", "collect_env.txt": "torch.version"}
    if case.profile.has_gpu:
        wanted["nvidia_smi.xml"] = "gpu.driver"
    found = {file: case.fact(name) for file, name in wanted.items()}
    lacking = [file for file, fact in found.items() if fact.path != file or fact.value is None]
    unknown = _no_checkout(case, "git.sha")
    if unknown and lacking == ["git_sha.txt"]:
        return unknown
    if lacking:
        notes = "; ".join(found[file].note for file in lacking if found[file].note)
        reason = f"not recorded: {', '.join(lacking)}{f' ({notes})' if notes else ''}"
        # The one file that needs a GPU's tool is missing for the reason that its rows give.
        follows = notes if lacking == ["nvidia_smi.xml"] else ""
        return incomplete(Reason.MISSING_ARTIFACT, reason, evidence=tuple(wanted), follows=follows)
    left = "" if case.profile.has_gpu else "; no nvidia_smi.xml: this profile uses no GPU"
    return passed(f"{', '.join(wanted)}{left}", evidence=tuple(wanted))


def branch(case: Case) -> Finding:
    """INVALID on another branch than the profile's; any branch where it names none.

    Nothing is fetched: that the last fetch brought commits which are not here is a warning.
    """
    expected = case.profile.branch
    behind = _behind(case)
    if expected is None:
        fact = case.fact("git.branch")
        seen = f"on {fact.value or fact.note or 'no checkout'}{behind}"
        return skipped(Reason.NOT_ASKED_FOR, f"{seen}; the profile does not require a branch")
    value = case.known("git.branch")
    if value.value == expected:
        answer = warned if behind else passed
        return answer(f"on {expected}{behind}", measurement=value)
    reason = f"on {value.value}, the profile expects {expected}"
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value)


def _behind(case: Case) -> str:
    """Words for the commits of its upstream that the checkout lacks; empty where there are none."""
    fact = case.evidence.facts.get("git.behind")
    return f", {fact.value:g} commits behind ({fact.note})" if fact and fact.value else ""


def clean_tree(case: Case) -> Finding:
    """A changed checkout is recorded; where the profile names a branch it is INVALID."""
    unknown = _no_checkout(case, "git.dirty")
    if unknown:
        return unknown
    value = case.known("git.dirty")
    if value.value is False:
        return passed("the checkout matches its commit", measurement=value)
    reason = f"the checkout differs from its commit: {value.note or 'see git_status.txt'}"
    paths = ("git_status.txt", "git_diff.patch")
    if case.profile.branch is None:
        return warned(reason, measurement=value, evidence=paths)
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value, evidence=paths)


def leftovers(case: Case) -> Finding:
    """INVALID where a trainer's starter is gone; a warning where trainers of a live run are seen.

    They are named, whoever started them, and left alone.
    """
    value = case.known("processes.leftover")
    if float(value.value) > 0:
        reason = f"{float(value.value):.0f}: {value.note}"
        return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value)
    running = case.known("processes.other_runs")
    if float(running.value) > 0:
        reason = f"none, but {float(running.value):.0f} of runs that go on beside: {running.note}"
        return warned(reason, measurement=running)
    return passed("none", measurement=value)


def variables(case: Case) -> Finding:
    """Toggles and variables of the surrounding shell, checked against the installed torch."""
    value = case.known("env.problems")
    if value.value:
        return invalid(Reason.WRONG_ENVIRONMENT, str(value.value), measurement=value)
    value = value.model_copy(update={"value": "no problem"})
    note = f"; {value.note}" if value.note else ""
    return passed(f"all variables are known{note}", measurement=value)


def needs(case: Case) -> Finding:
    """INVALID where a launch of this run needs what is not there, such as a package or the hub."""
    if "needs.missing" not in case.evidence.facts:
        return skipped(Reason.NOT_ASKED_FOR, "on nodes of a cluster it was not looked at")
    value = case.known("needs.missing")
    if value.value:
        return invalid(Reason.WRONG_ENVIRONMENT, str(value.value), measurement=value)
    value = value.model_copy(update={"value": "nothing"})
    return passed(value.note or "nothing beside the program", measurement=value)


def sequential_prefill(case: Case) -> Finding:
    """A warning where prefill goes token by token at S >= 1024, as the baseline is planned."""
    if "baseline" not in case.profile.phases:
        raise incomplete(Reason.NOT_RUN, "the profile plans no baseline")
    planned = environment(case.context, "baseline")
    batched = bool(meaning("NSA_PREFILL_BATCHED", planned))
    override = case.context.config_overrides.get("train.seq_len")
    length = int(planned.get("NSA_SEQ_LEN") or override or case.profile.workload.seq_len)
    if length >= LONG_SEQUENCE and not batched:
        return warned(f"sequential prefill at S={length}: loops over tokens in Python")
    how = "batched" if batched else "sequential"
    return passed(f"{how} prefill at S={length}")


# Settings that skew numbers: from where on a value does, what it means, and the remedy.
_SETTINGS: dict[str, tuple[Callable[[Any, Any], bool], float, str, str]] = {
    "shm_gib": (lt, SHM_LEAST_GIB, "shared memory (/dev/shm) is small",
                "mount it larger (container: --shm-size)"),
    "shm_free_gib": (lt, SHM_LEAST_GIB, "shared memory (/dev/shm) is nearly full",
                     "remove what is left in it"),
    "load_per_cpu": (gt, BUSY_SHARE, "the machine is loaded (runnable per CPU)", "end other work"),
    "busy_cpus": (gt, 1.0, "other processes keep CPUs busy", "end them, or run when it is quiet"),
}  # fmt: skip


def host_settings(case: Case) -> Finding:
    """A warning that names each setting that skews numbers, and each that could not be read."""
    facts = case.evidence.facts
    known = {name: facts[f"host.{name}"] for name in _SETTINGS if f"host.{name}" in facts}
    if not known:
        raise missing("no setting of the host was collected")
    told = [text for name, fact in known.items() if (text := _skewing(name, fact))]
    silent = [f"{name} ({fact.note})" for name, fact in known.items() if fact.value is None]
    paths = tuple(dict.fromkeys(fact.path for fact in known.values()))
    parts = [*told, *([f"unreadable: {', '.join(silent)}"] if silent else [])]
    if told:
        return warned("; ".join(parts), evidence=paths)
    fine = f"{len(known) - len(silent)} settings read, none skews numbers"
    return passed("; ".join([fine, *parts]), evidence=paths)


def _skewing(name: str, fact: Fact) -> str:
    skews, bound, words, remedy = _SETTINGS[name]
    if fact.value is None or isinstance(fact.value, str) or not skews(fact.value, bound):
        return ""
    unit = f" {fact.unit}" if fact.unit else ""
    return f"{words} ({fact.value}{unit}): {remedy}"


def other_work(case: Case, name: str) -> Finding:
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
