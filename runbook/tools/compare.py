"""Run B beside run A: everything that both ran, one answer whether B is worse, and all as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runbook.folder.facts import Difference
from runbook.records import Outcome, RunRecord
from runbook.records.measurement import json_ready, plain_number
from runbook.stats.decision import Decided
from runbook.tools.compare_sides import (
    SpeedChange,
    differences,
    obstacles,
    phases_run,
    read_side,
    speed_changes,
)

_LOAD = ("host.load_per_cpu", "host.busy_cpus")


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

    @property
    def changed(self) -> bool:
        """True if the outcome is another."""
        return self.a != self.b

    def lines(self, said: str) -> list[str]:
        """Its id with what is `said` of it, and both values below."""
        values = (("A", self.a_value), ("B", self.b_value))
        return [f"  {self.id}{said}", *(f"    {side}  {value}" for side, value in values if value)]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Run A (the reference) against run B.

    `only_a` and `only_b` name the phases that the other did not run: nothing else is said of
    them. `loads` has what each run recorded of other work on its machine.
    """

    a: str
    b: str
    a_verdict: str
    b_verdict: str
    a_scope: str
    b_scope: str
    differences: tuple[Difference, ...]
    obstacles: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    checks: tuple[CheckChange, ...]
    speeds: tuple[SpeedChange, ...]
    loads: tuple[tuple[str, str, str], ...]

    @property
    def comparable(self) -> bool:
        """True if a difference in the numbers can be ascribed to one cause."""
        return not self.obstacles

    @property
    def exit_code(self) -> int:
        """0 nothing is worse, 1 a required check or the speed is, 3 it cannot be said."""
        if not self.comparable:
            return 3
        outcomes = {one.decision.outcome for one in self.speeds if one.decision}
        if Decided.FAIL in outcomes or any(check.worse and check.required for check in self.checks):
            return 1
        return 3 if Decided.INCONCLUSIVE in outcomes else 0

    @property
    def conclusion(self) -> str:
        """The answer in words."""
        return _CONCLUSIONS[self.exit_code] if self.comparable else "NOT COMPARABLE"

    def document(self) -> dict[str, Any]:
        """For `runbook compare --json`; NaN and infinities become words."""
        found: dict[str, Any] = json_ready(asdict(self))
        head = {"schema_version": 3, "exit_code": self.exit_code, "comparable": self.comparable}
        return {**head, **found}


_CONCLUSIONS = {0: "B is not shown to be worse than A", 1: "B is worse than A", 3: "undecided"}


def compare_runs(a: RunRecord, a_folder: Path, b: RunRecord, b_folder: Path) -> Comparison:
    """Compare run B with the reference A. Raises OSError if a folder cannot be read."""
    left, right = read_side(a, a_folder), read_side(b, b_folder)
    found = differences(left, right)
    reasons = obstacles(left, right, found)
    ran_a, ran_b = phases_run(a), phases_run(b)
    both = [name for name in ran_a if name in ran_b]
    return Comparison(
        a=a.run_id,
        b=b.run_id,
        a_verdict=left.record.verdict.value,
        b_verdict=right.record.verdict.value,
        a_scope=a.scope,
        b_scope=b.scope,
        differences=tuple(found),
        obstacles=tuple(reasons),
        only_a=tuple(name for name in ran_a if name not in ran_b),
        only_b=tuple(name for name in ran_b if name not in ran_a),
        checks=_checks(a, b, both),
        speeds=tuple(speed_changes(left, right, comparable=not reasons)),
        loads=_loads(a, b, both),
    )


def _checks(a: RunRecord, b: RunRecord, phases: list[str]) -> tuple[CheckChange, ...]:
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


def _loads(a: RunRecord, b: RunRecord, phases: list[str]) -> tuple[tuple[str, str, str], ...]:
    """What preflight, and each phase's launches, recorded of other work on the machine."""
    names = dict(zip(_LOAD, _LOAD, strict=True))
    names |= {f"load.{phase}": f"launches of {phase}" for phase in phases}
    left, right = a.environment, b.environment
    return tuple(
        (shown, left.get(name, "not recorded"), right.get(name, "not recorded"))
        for name, shown in names.items()
        if name in left or name in right
    )


def comparison_lines(found: Comparison) -> list[str]:
    """Comparable or not, what differs, which checks and numbers changed, and the answer."""
    lines = [f"A  {found.a}  {found.a_verdict}", f"B  {found.b}  {found.b_verdict}", ""]
    lines.append("comparable" if found.comparable else "not comparable, because")
    lines += [f"  {reason}" for reason in found.obstacles]
    lines += ["", "what differs"]
    lines += [f"  {one.kind}  {one.what}: {one.a} -> {one.b}" for one in found.differences]
    if not found.differences:
        lines.append("  nothing that the runs recorded")
    lines += [f"load  {name}: {a} -> {b}" for name, a, b in found.loads]
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"only {side} ran: {', '.join(names)}"] if names else []
    changed = [check for check in found.checks if check.changed]
    lines += ["", f"checks: {len(found.checks) - len(changed)} the same, {len(changed)} changed"]
    for check in changed:
        required = " (required)" if check.required else ""
        lines += check.lines(f"{required}  {check.a or 'no row'} -> {check.b or 'no row'}")
    both = [check for check in found.checks if not check.changed and check.a_value]
    other = [check for check in both if check.a_value != check.b_value]
    lines += ["", f"numbers: {len(both) - len(other)} equal, {len(other)} others"] if both else []
    lines += [line for check in other for line in check.lines("")]
    for speed in found.speeds:
        lines += ["", *_speed_text(speed)]
    return [*lines, "", found.conclusion]


def _speed_text(speed: SpeedChange) -> list[str]:
    sides = " -> ".join("/".join(map(plain_number, values)) for values in (speed.a, speed.b))
    lines = [f"throughput of {speed.phase}, tokens over time: {sides} tok/s"]
    lines.append(f"  B / A = {speed.ratio:.4f} over {len(speed.launches)} launches: {speed.says}")
    if speed.decision:
        lines.append(f"  {speed.decision.outcome.value}: {speed.decision.reason}")
    lines.append(f"  {speed.note}")
    return lines
