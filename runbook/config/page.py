"""The page of thresholds, written from the phases' declarations and the shipped profiles."""

from __future__ import annotations

from collections.abc import Iterator

from nsa.contract import Ceiling
from runbook.config import registry
from runbook.config.limits import Limit
from runbook.config.load import load_profile, profile_names
from runbook.config.profile import Profile

_BASE = "a100x2_pcie4"

_INTRO = """\
# Thresholds

Every limit, and where its value comes from: a requirement of [the specification](spec.md), or a
choice of this program. A phase declares a limit in code; a profile in `configs/profiles/*.yaml`
gives it a value, a source and whether it decides. `runbook profiles --page > docs/thresholds.md`
writes this page; a test compares. [How far to trust this](trust.md) has the measured error rates.

A *gate* decides, unless the profile only shows it. An *aim* is only shown. A *rule* is part of how
a decision is made. A limit that belongs to a toggle is set with that toggle.

A profile of your own says `extends: a100x2_pcie4` and what differs; `null` drops an inherited key.
`runbook run --profile mine.yaml` uses it, `runbook judge RUN --profile mine.yaml` judges a finished
run again by it.
"""

Cells = tuple[str, ...]
# A profile's name and what its row says.
Row = tuple[str, Cells]


def thresholds_page() -> str:
    """The whole page, as Markdown."""
    base = load_profile(_BASE)
    others = [load_profile(name) for name in profile_names() if name != _BASE]
    lines = [_INTRO, f"## Limits, with the values of {base.name} ({base.title})", ""]
    lines += [*_limits(base), "", "## Other profiles", "", *_others(base, others)]
    return "\n".join([*lines, *_peaks([base, *others]), *_fixed(), ""])


def limits_of(profile: Profile) -> list[Limit]:
    """The limits that a profile sets, in force, in the order of the phases."""
    known = registry.known_limits(profile.phases)
    return [profile.limit(spec) for spec in known.values() if spec.name in profile.limits]


def _limits(base: Profile) -> Iterator[str]:
    """What each limit is about, and what the base sets it to."""
    values = {limit.spec.name: limit for limit in limits_of(base)}
    phases = registry.phases()
    yield "| limit | use | what it limits | read by | value | source |"
    yield "|---|---|---|---|---|---|"
    for name, spec in registry.known_limits(phases).items():
        readers = ", ".join(one.name for one in phases.values() if spec in one.limits)
        use = f"{spec.use}, set with `{spec.toggle}`" if spec.toggle else str(spec.use)
        limit = values.get(name)
        value, source = (_shown(limit), limit.source) if limit else ("the toggle's", "")
        cells = (name, use, spec.meaning, readers, value, source)
        yield f"| {' | '.join(cells)} |"


def _shown(limit: Limit) -> str:
    return f"{limit}{'' if limit.gated else ' (shown)'}"


def _others(base: Profile, others: list[Profile]) -> Iterator[str]:
    for one in others:
        left_out = sorted(set(base.required) - set(one.required))
        yield f"- {one.name}: {one.title}. Not required: {', '.join(left_out) or 'nothing less'}."
    yield ""
    yield from _shared(("limit", "value", "source"), _changed(base, others))
    yield ""


def _changed(base: Profile, others: list[Profile]) -> list[Row]:
    """The limits that another profile sets otherwise than the base does."""
    order = [limit.spec.name for limit in limits_of(base)]
    changed = [
        (one.name, (limit.spec.name, _shown(limit), limit.source))
        for one in others
        for limit in limits_of(one)
        if one.limits[limit.spec.name] != base.limits.get(limit.spec.name)
    ]
    return sorted(changed, key=lambda row: order.index(row[1][0]))


def _shared(head: Cells, rows: list[Row]) -> Iterator[str]:
    """A table of the rows, each once, with the profiles that have it."""
    found: dict[Cells, list[str]] = {}
    for profile, cells in rows:
        found.setdefault(cells, []).append(profile)
    yield f"| {' | '.join((*head, 'profiles'))} |"
    yield "|" + "---|" * (len(head) + 1)
    for cells, names in found.items():
        yield f"| {' | '.join((*cells, ', '.join(names)))} |"


def _peaks(profiles: list[Profile]) -> Iterator[str]:
    yield "## What no measured ceiling can pass"
    yield ""
    yield "`hardware.peaks` of a profile: what the specification of the device or the link allows."
    yield ""
    rows: list[Row] = []
    for profile in profiles:
        for what, peak in profile.hardware.peaks.items():
            unit = "TFLOP/s" if what == Ceiling.MATMUL else "GB/s"
            rows.append((profile.name, (what, f"{peak.value:g} {unit}", peak.source)))
    rows.sort(key=lambda row: list(Ceiling).index(Ceiling(row[1][0])))
    yield from _shared(("ceiling", "peak", "source"), rows)
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
