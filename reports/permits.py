"""What a verdict permits, in a sentence; for a GO also for what, and the command behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runbook.records import RunRecord, Verdict
from runbook.text import short_caveat

_SHORT_COMMIT = 7


@dataclass(frozen=True, kw_only=True)
class Permit:
    """`says`: what the reader may do. The others belong to a GO, and are empty otherwise.

    `qualified`: what its caveats mean for production. `valid_for`: what it holds for. `command`
    starts the production run behind it, `label` names what that is, and `does` says whether it
    needs the settings in the shell; `instead` says how, where this program has no such command.
    `changed` says of the caveats what they mean, where `qualified` does not; of any verdict.
    """

    says: str
    qualified: str = ""
    valid_for: str = ""
    command: str = ""
    label: str = ""
    does: str = ""
    instead: str = ""
    changed: str = ""


# What a change of the shipped profile has to do with the verdict.
_BESIDE_A_CHANGE = {
    Verdict.NO_GO: "A change alone never makes a NO-GO; a failed check below does.",
    Verdict.INCOMPLETE: (
        "A change alone never makes a run INCOMPLETE; the evidence that is missing below does."
    ),
    Verdict.PARTIAL: "What passed, passed with that.",
    Verdict.GO: "What passed, passed with that.",
}
# A launch has the profile's variables, the line's settings and what the GO's phases chose
# (`runbook.engine.earlier.standing`): together the exports.
_EXPORTS = "it sets the settings below itself; they are for a trainer that you start by hand"


def permit_of(record: RunRecord) -> Permit:
    """What this run permits."""
    permit = _permit(record)
    told = ", ".join(map(short_caveat, record.caveats))
    if permit.qualified or not told:
        return permit
    changed = f"Not the shipped profile as it is: {told}. {_BESIDE_A_CHANGE[record.verdict]}"
    return replace(permit, changed=changed)


def _permit(record: RunRecord) -> Permit:
    if record.verdict is Verdict.NO_GO:
        return Permit(says="Do not start the production run.")
    if record.verdict is Verdict.PARTIAL:
        return Permit(says="This is no GO yet: other required checks have not run.")
    if record.verdict is Verdict.INCOMPLETE:
        trained = any(phase.ran for phase in record.phases)
        why = "required evidence is missing" if trained else "nothing could be measured"
        return Permit(says=f"Not approved: {why}. Do not start the production run.")
    if record.options.get("plan"):
        return Permit(says="Every phase of this launch passed its gate.", valid_for=_valid(record))
    said = Permit(says=_approved(record), qualified=_qualified(record), valid_for=_valid(record))
    if record.profile_document.get("own_trainer"):
        return replace(said, instead="Start your trainer as you do, with the settings below.")
    return replace(
        said,
        command=record.invocation.production_line(),
        label="Start the CPU run" if _on_cpu(record) else "Start production",
        does=_EXPORTS if record.exports else "",
    )


def _on_cpu(record: RunRecord) -> bool:
    hardware = record.profile_document.get("hardware")
    return isinstance(hardware, Mapping) and hardware.get("device") == "cpu"


def _approved(record: RunRecord) -> str:
    """What a GO of this machine permits and what it does not."""
    document = record.profile_document
    floor = any(name.endswith(".throughput") for name in record.required)
    judged = bool(document.get("throughput_gated", True)) and floor
    speed = "" if judged else "Speed was not judged. "
    if _on_cpu(record):
        return f"The code works on this CPU. {speed}This approves no run on GPUs."
    return f"{speed}The production run may start on this machine with this configuration."


def _qualified(record: RunRecord) -> str:
    """A launch behind a GO that had caveats is started, and says them again (`runbook launch`)."""
    if not record.caveats:
        return ""
    told = ", ".join(map(short_caveat, record.caveats))
    return (
        f"A qualified GO: {told}. runbook launch with the same profile and settings starts "
        "behind it and repeats this in its own verdict; a run without it gives an unqualified GO."
    )


def _valid(record: RunRecord) -> str:
    known = record.environment
    commit = known.get("git.sha", "")[:_SHORT_COMMIT]
    changed = " with changes that are not committed" if known.get("git.dirty") == "True" else ""
    parts = [f"commit {commit}{changed}"] if commit else []
    return ", ".join([*parts, "this machine", f"profile {record.profile}"])
