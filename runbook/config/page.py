"""The page of thresholds, written from the phases' declarations and the shipped profiles."""

from __future__ import annotations

from collections.abc import Iterator

from nsa.contract import Ceiling
from runbook import registry
from runbook.config.limits import Limit
from runbook.config.load import load_profile, profile_names
from runbook.config.profile import Profile

_BASE = "a100x2_pcie4"

_INTRO = """\
# Thresholds

Every limit, and where its value comes from. A phase declares a limit in code (name, unit,
comparator, meaning); a profile in `configs/profiles/*.yaml` gives it a value, a source and whether
it decides there. This page is written from both: `runbook profiles --page > docs/thresholds.md`;
a test compares. A source is a requirement of [the specification](spec.md), or says that the number
is a choice of this program.

A *gate* decides, unless the profile only shows it. An *aim* is always only shown. A *rule* is a
part of how a decision is made. A limit whose value belongs to a toggle is set with that toggle.

A profile of your own says `extends: a100x2_pcie4` and only what differs; `null` drops an inherited
key. `runbook run --profile mine.yaml` uses it, `runbook judge RUN --profile mine.yaml` judges a
finished run again by it.
"""

_OUTRO = """
The production config fixes the *global* batch, so one GPU runs all of it: E compares N ranks with
one at the same global batch (strong scaling). One GPU gains from the larger batch per device, which
makes this E a cautious one. Gradient checkpointing is off on both sides, as DDP switches it off.
[How far to trust this](trust.md) has the error rates that were measured.
"""


def thresholds_page() -> str:
    """The whole page, as Markdown."""
    base = load_profile(_BASE)
    lines = [_INTRO, "## Limits", "", *_declared(), "", f"## {base.name}: {base.title}", ""]
    lines += [*_values(base, list(base.limits)), "", "## Other profiles", ""]
    for name in profile_names():
        if name != _BASE:
            lines += _differences(base, load_profile(name))
    return "\n".join([*lines, *_peaks(), *_fixed(), _OUTRO])


def limits_of(profile: Profile) -> list[Limit]:
    """The limits that a profile sets, in force, in the order of the phases."""
    known = registry.known_limits(profile.phases)
    return [profile.limit(spec) for spec in known.values() if spec.name in profile.limits]


def _declared() -> Iterator[str]:
    yield "| limit | use | what it limits | read by |"
    yield "|---|---|---|---|"
    phases = registry.phases()
    for name, spec in registry.known_limits(phases).items():
        readers = ", ".join(one.name for one in phases.values() if spec in one.limits)
        use = f"{spec.use}, set with `{spec.toggle}`" if spec.toggle else str(spec.use)
        yield f"| {name} | {use} | {spec.meaning} | {readers} |"


def _values(profile: Profile, names: list[str]) -> Iterator[str]:
    yield "| limit | value | source |"
    yield "|---|---|---|"
    for limit in limits_of(profile):
        if limit.spec.name in names:
            shown = "" if limit.gated else " (shown)"
            yield f"| {limit.spec.name} | {limit}{shown} | {limit.source} |"


def _differences(base: Profile, other: Profile) -> Iterator[str]:
    changed = [name for name in other.limits if other.limits[name] != base.limits.get(name)]
    left_out = sorted(set(base.required) - set(other.required))
    yield f"### {other.name}: {other.title}"
    yield ""
    yield from _values(other, changed)
    yield ""
    yield f"Not required here: {', '.join(left_out) or 'nothing less'}."
    yield ""


def _peaks() -> Iterator[str]:
    yield "## What no measured ceiling can pass"
    yield ""
    yield "`hardware.peaks` of a profile: what the specification of the device or the link allows."
    yield ""
    yield "| profile | ceiling | peak | source |"
    yield "|---|---|---|---|"
    for name in profile_names():
        for what, peak in load_profile(name).hardware.peaks.items():
            unit = "TFLOP/s" if what == Ceiling.MATMUL else "GB/s"
            yield f"| {name} | {what} | {peak.value:g} {unit} | {peak.source} |"
    yield ""


def _fixed() -> Iterator[str]:
    yield "## The same on every machine"
    yield ""
    yield "Physics and error rates do not depend on the machine: they are in the code, not in a"
    yield "profile."
    yield ""
    yield "| phase | what | rule | why, or error |"
    yield "|---|---|---|---|"
    for phase in registry.phases().values():
        for one in phase.fixed:
            yield f"| {phase.name} | {one.what} | {one.rule} | {one.why} |"
