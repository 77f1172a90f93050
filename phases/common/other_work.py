"""Row `other_work`: what else kept the CPUs busy while a launch was timed; it never decides."""

from __future__ import annotations

from phases.common.case import Case, Finding, passed, skipped, warned
from phases.common.measure import in_file
from phases.limits import OTHER_WORK_SHARE
from runbook.folder.launch.documents import load_of
from runbook.records import Reason


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
    value = in_file(
        launch.load_path, launch.load_sha256, "other_work", round(load.taken, 4), "of the CPUs"
    )
    if load.taken > OTHER_WORK_SHARE:
        reason = f"{name}: {load}; more than {OTHER_WORK_SHARE:.0%} skews what is timed here"
        return warned(reason, measurement=value)
    return passed(f"{name}: {load}", measurement=value)
