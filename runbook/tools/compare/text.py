"""A comparison as text: the answer last, as everywhere."""

from __future__ import annotations

from runbook.records.measurement import plain_number
from runbook.text import in_one_line
from runbook.tools.compare.numbers import MetricChange, SpeedChange
from runbook.tools.compare.runs import Comparison

# What a number's change says, as it is counted.
_SAYS = {
    "differs": "beyond the noise of both runs",
    "no interval": "without an interval",
    "within noise": "within the noise",
    "equal": "equal",
}
# Those that are told one by one, under their heading.
_TOLD = {
    "differs": "beyond the noise of both runs",
    "no interval": "without an interval on both sides: what is noise is not known",
}


def comparison_text(found: Comparison) -> str:
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
        lines.append(f"  {check.id}{required}  {check.a or 'no row'} -> {check.b or 'no row'}")
        values = (("A", check.a_value), ("B", check.b_value))
        lines += [f"    {side}  {value}" for side, value in values if value]
    lines += _metrics_text(found.metrics)
    for speed in found.speeds:
        lines += ["", *_speed_text(speed)]
    return "\n".join(map(in_one_line, [*lines, "", found.conclusion]))


def _metrics_text(metrics: tuple[MetricChange, ...]) -> list[str]:
    if not metrics:
        return []
    counts = ((words, sum(one.says == says for one in metrics)) for says, words in _SAYS.items())
    lines = ["", "numbers: " + ", ".join(f"{count} {words}" for words, count in counts if count)]
    for says, heading in _TOLD.items():
        found = [one for one in metrics if one.says == says]
        lines += [f"  {heading}"] if found else []
        lines += [f"    {one.id}  {plain_number(one.a)} -> {metric_text(one)}" for one in found]
    return lines


def metric_text(one: MetricChange) -> str:
    """B's value, the difference with its interval, and what that says."""
    unit = f" {one.unit}" if one.unit else ""
    if one.says == "equal":
        return f"{plain_number(one.b)}{unit}, equal"
    share = f", {one.difference / abs(one.a):+.1%}" if one.a else ""
    bounds = ""
    if one.interval is not None:
        low, high = map(plain_number, one.interval)
        bounds = f"; {low} to {high}, {one.says}"
    return f"{plain_number(one.b)}{unit} ({plain_number(one.difference)}{share}{bounds})"


def _speed_text(speed: SpeedChange) -> list[str]:
    sides = " -> ".join("/".join(map(plain_number, values)) for values in (speed.a, speed.b))
    lines = [f"throughput of {speed.phase}, tokens over time: {sides} tok/s"]
    lines.append(f"  B / A = {speed.ratio:.4f} over {len(speed.launches)} launches: {speed.says}")
    if speed.decision:
        lines.append(f"  {speed.decision.outcome.value}: {speed.decision.reason}")
    lines.append(f"  {speed.note}")
    return lines
