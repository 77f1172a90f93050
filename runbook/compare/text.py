"""A comparison as text for a reader."""

from __future__ import annotations

from runbook.compare.types import Comparison, SpeedChange

__all__ = ["comparison_text"]


def comparison_text(found: Comparison) -> str:
    """Comparable or not, what differs, which checks changed, how the speed changed."""
    lines = [f"A  {found.a}  {found.a_verdict}", f"B  {found.b}  {found.b_verdict}", ""]
    lines.append("comparable" if found.comparable else "NOT COMPARABLE")
    lines += [f"  {reason}" for reason in found.obstacles]
    lines += ["", "what differs"]
    lines += [f"  {one.kind}  {one.what}: {one.a} -> {one.b}" for one in found.differences]
    if not found.differences:
        lines.append("  nothing that the runs recorded")
    changed = [check for check in found.checks if check.changed]
    lines += ["", f"checks: {len(found.checks) - len(changed)} the same, {len(changed)} changed"]
    for check in changed:
        required = " (required)" if check.required else ""
        lines.append(f"  {check.id}{required}  {check.a or 'no row'} -> {check.b or 'no row'}")
        lines += [f"    {side}  {value}" for side, value in _values(check.a_value, check.b_value)]
    for speed in found.speeds:
        lines += ["", *_speed(speed)]
    lines += ["", _conclusion(found)]
    return "\n".join(lines)


def _values(a: str, b: str) -> list[tuple[str, str]]:
    return [(side, value) for side, value in (("A", a), ("B", b)) if value]


def _speed(speed: SpeedChange) -> list[str]:
    sides = " -> ".join(
        "/".join(f"{value:.4g}" if value < 10_000 else f"{value:.0f}" for value in values)
        for values in (speed.a, speed.b)
    )
    lines = [f"throughput of {speed.phase}, tokens over time: {sides} toks/s"]
    lines.append(f"  B / A = {speed.ratio:.4f} over {len(speed.launches)} launches")
    if speed.decision:
        lines.append(f"  {speed.decision.outcome.value}: {speed.decision.reason}")
    lines.append(f"  {speed.note}")
    return lines


def _conclusion(found: Comparison) -> str:
    if found.exit_code == 1:
        return "B is worse than A"
    if found.exit_code == 0:
        return "B is not shown to be worse than A"
    return "undecided"
