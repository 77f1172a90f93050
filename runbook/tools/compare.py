"""Run B beside the reference A: may their numbers be compared, and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runbook.engine.derive import doubt, untrusted
from runbook.folder import RECORD_FILE
from runbook.folder.facts import Difference, Facts, launch_facts, unlike
from runbook.records import Outcome, RunRecord
from runbook.records.measurement import json_ready

_CAUSES = ("code", "machine", "software", "toggles")
_TOGGLES = ("NSA_", "NCCL_", "TORCH_")
# What a run records of other work on its machine.
_LOAD = ("host.load_per_cpu", "host.busy_cpus", "load.")


@dataclass(frozen=True, kw_only=True)
class CheckChange:
    """A check of a phase that both ran; an absent side is an empty outcome.

    `worse`: it passed in A only.
    """

    id: str
    required: bool
    a: str
    b: str
    a_value: str
    b_value: str
    worse: bool

    def lines(self, said: str = "") -> list[str]:
        """Its id with what is `said` of it, and both values below."""
        values = (("A", self.a_value), ("B", self.b_value))
        return [f"  {self.id}{said}", *(f"    {side}  {value}" for side, value in values if value)]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Run A (the reference) against run B.

    `a_said` and `b_said` are the verdicts with what they leave out.
    `only_a` and `only_b` name the phases that the other did not run: nothing else is said of them.
    """

    a: str
    b: str
    a_said: str
    b_said: str
    differences: tuple[Difference, ...]
    obstacles: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    checks: tuple[CheckChange, ...]

    @property
    def exit_code(self) -> int:
        """0 nothing is worse, 1 a required check is, 3 the runs are not comparable."""
        if self.obstacles:
            return 3
        return int(any(check.worse and check.required for check in self.checks))

    def document(self) -> dict[str, Any]:
        """For `runbook compare --json`."""
        found: dict[str, Any] = json_ready(asdict(self))
        head = {"exit_code": self.exit_code, "comparable": not self.obstacles}
        return {"schema_version": 5, **head, **found}


_CONCLUSIONS = {0: "B is not shown to be worse than A", 1: "B is worse than A", 3: "NOT COMPARABLE"}


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One run with what its trainer launches ran on, by phase and launch; None without env.json.

    `doubt`: why its run.json is not believed; then its verdict is not repeated.
    """

    record: RunRecord
    doubt: str
    launches: Mapping[str, Facts | None]

    @classmethod
    def read(cls, record: RunRecord, folder: Path) -> _Side:
        launches = {
            entry.launch.id: launch_facts(folder / entry.launch.run_dir)
            for entry in record.launches()
            if entry.launch.kind in ("trainer", "own")
        }
        why = doubt(folder, record)
        told = untrusted(record, why) if why else record
        return cls(record=told, doubt=why, launches=launches)

    @property
    def phases(self) -> list[str]:
        """The phases that were started; the others have rows that only say so."""
        return [one.name for one in self.record.phases if one.started_at or one.launches]


def compare_runs(a: RunRecord, a_folder: Path, b: RunRecord, b_folder: Path) -> Comparison:
    """Compare run B with the reference A. Raises OSError if a folder cannot be read."""
    left, right = _Side.read(a, a_folder), _Side.read(b, b_folder)
    found = _differences(left, right)
    ran_a, ran_b = left.phases, right.phases
    return Comparison(
        a=a.run_id,
        b=b.run_id,
        a_said=left.record.said,
        b_said=right.record.said,
        differences=tuple(found),
        obstacles=tuple(_obstacles(left, right, found)),
        only_a=tuple(name for name in ran_a if name not in ran_b),
        only_b=tuple(name for name in ran_b if name not in ran_a),
        checks=_checks(a, b, [name for name in ran_a if name in ran_b]),
    )


def _differences(a: _Side, b: _Side) -> list[Difference]:
    """Everything about the two runs that differs, each once, with the launches it is seen in."""
    found = unlike(_record_facts(a.record), _record_facts(b.record), absent="unset")
    seen: dict[Difference, list[str]] = {}
    for name, left in a.launches.items():
        right = b.launches.get(name)
        if left is not None and right is not None:
            for one in unlike(left, right):
                seen.setdefault(one, []).append(name)
    for one, where in seen.items():
        place = where[0] if len(where) == 1 else f"{len(where)} launches"
        found.append(replace(one, what=f"{one.what} ({place})"))
    return found


def _record_facts(record: RunRecord) -> Facts:
    facts = {
        ("work", "profile"): record.profile,
        ("work", "profile digest"): record.profile_sha256[:12],
        ("harness", "runbook"): record.tool_version,
    }
    for name, value in sorted(record.settings.items()):
        facts["toggles" if name.startswith(_TOGGLES) else "work", name] = value
    loads = {name: text for name, text in record.environment.items() if name.startswith(_LOAD)}
    return facts | {("load", name): text for name, text in loads.items()}


def _obstacles(a: _Side, b: _Side, found: Sequence[Difference]) -> list[str]:
    """Why a difference in the numbers could not be ascribed to one cause; empty if it can."""
    reasons = [
        f"not the same work and limits: {one.what}: {one.a} against {one.b}"
        for one in found
        if one.kind == "work"
    ]
    causes = [kind for kind in _CAUSES if any(one.kind == kind for one in found)]
    if len(causes) > 1:
        reasons.append(f"more than one thing differs: {', '.join(causes)}")
    common = [name for name in a.launches if name in b.launches]
    if not common:
        reasons.append("the runs have no trainer launch in common")
    if blind := [one for one in common if None in (a.launches[one], b.launches[one])]:
        reasons.append(f"no env.json on both sides for: {', '.join(blind)}")
    for side in (a, b):
        run_id = side.record.run_id
        if side.doubt:
            reasons.append(f"{RECORD_FILE} of {run_id} {side.doubt}: see runbook verify {run_id}")
        if side.record.interrupted or side.record.finished_at is None:
            reasons.append(f"run {run_id} did not complete")
    return reasons


def _checks(a: RunRecord, b: RunRecord, phases: Sequence[str]) -> tuple[CheckChange, ...]:
    """The checks of these phases; one that vanished from a phase that ran is a change too."""
    sides = [{check.id: check for check in run.checks() if check.phase in phases} for run in (a, b)]
    required = {*a.required, *b.required}
    wanted = (name for name in (*a.required, *b.required) if name.partition(".")[0] in phases)
    # What one of the two was not asked for cannot have changed.
    left_out = {check.id for run in (a, b) for check in run.checks() if check.left_out}
    changes = []
    for name in dict.fromkeys([*sides[0], *sides[1], *wanted]):
        if name in left_out:
            continue
        left, right = (side.get(name) for side in sides)
        said = (left.outcome.value if left else "", right.outcome.value if right else "")
        changes.append(
            CheckChange(
                id=name,
                required=name in required,
                a=said[0],
                b=said[1],
                a_value=str(left.measurement) if left and left.measurement else "",
                b_value=str(right.measurement) if right and right.measurement else "",
                worse=said[0] == Outcome.PASS != said[1],
            )
        )
    return tuple(changes)


def comparison_lines(found: Comparison) -> list[str]:
    """Comparable or not, what differs, which checks and numbers changed, and the answer."""
    lines = [f"A  {found.a}  {found.a_said}", f"B  {found.b}  {found.b_said}", ""]
    lines.append("not comparable, because" if found.obstacles else "comparable")
    lines += [f"  {reason}" for reason in found.obstacles]
    lines += ["", "what differs"]
    lines += [f"  {one.kind}  {one.what}: {one.a} -> {one.b}" for one in found.differences]
    if not found.differences:
        lines.append("  nothing that the runs recorded")
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"only {side} ran: {', '.join(names)}"] if names else []
    changed = [check for check in found.checks if check.a != check.b]
    lines += ["", f"checks: {len(found.checks) - len(changed)} the same, {len(changed)} changed"]
    for check in changed:
        required = " (required)" if check.required else ""
        lines += check.lines(f"{required}  {check.a or 'no row'} -> {check.b or 'no row'}")
    both = [check for check in found.checks if check.a == check.b and check.a_value]
    other = [check for check in both if check.a_value != check.b_value]
    lines += ["", f"numbers: {len(both) - len(other)} equal, {len(other)} others"] if both else []
    lines += [line for check in other for line in check.lines()]
    return [*lines, "", _CONCLUSIONS[found.exit_code]]
