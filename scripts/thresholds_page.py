"""The page of thresholds, written from the phases' declarations and the shipped profiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nsa.contract import Ceiling
from runbook.config import Limit, Profile, registry
from runbook.config.load import limits_of, load_profile, profile_names

_BASE = "a100x2_pcie4"

_INTRO = """\
# Thresholds

Every limit, and where its value comes from: a requirement of [the specification](spec.md), or a
choice of this program. A phase declares a limit; a profile gives it a value, a source and whether
it decides. `python scripts/thresholds_page.py > docs/thresholds.md` writes this page.
[How far to trust this](trust.md) has the measured error rates.

A *gate* decides, unless the profile only shows it. An *aim* is only shown. A *rule* is part of how
a decision is made. A limit that belongs to a toggle is set with that toggle.

[A profile of your own](../CONTRIBUTING.md#add-a-profile) changes them for a run, or for
[judging one again](artifacts.md#verify-and-judge-again).
"""

_MACHINES = """\
A name says card, number and link: `a100x2_pcie4`, `h100x8_nvlink`, `b200x1`; x2 stands for 2 to 8
here. Values follow from the card's data sheet (`configs/machines/cards.yaml`) by the shares that
the sources above name; `..` and a second number: the most that the device or its link allows, with
which no measurement passes (`hardware.peaks`). More than two GPUs train one sequence each
(`NSA_BATCH_SIZE`). H100 and H200 were measured alone (benchmarks/results), the others never.
"""

Cells = tuple[str, ...]
# The limits that follow from a card and its link.
_PEAKS = {
    "ceiling_matmul_tflops": Ceiling.MATMUL,
    "ceiling_memory_gb_s": Ceiling.MEMORY_COPY,
    "ceiling_host_gb_s": Ceiling.HOST_COPY,
    "ceiling_all_reduce_gb_s": Ceiling.ALL_REDUCE,
}
_OF_MACHINE = (*_PEAKS, "memory_gib", "mfu_floor", "throughput")
# Profiles that stand for all that leave out the same checks.
_LEAVE_OUT = {
    "a100x1": "One GPU of any kind: nothing scales, and no rank exchanges anything.",
    "a100x2_nvlink": "Several on NVLink: how the host reaches the cards is not asked.",
    "cpu": "`cpu` proves function, no speed.",
}


def thresholds_page() -> str:
    """The whole page, as Markdown."""
    base = load_profile(_BASE)
    others = [load_profile(name) for name in profile_names() if name != _BASE]
    lines = [_INTRO, f"## Limits, with the values of {base.name} ({base.title})", ""]
    lines += [*_limits(base), "", "## Other machines", "", _MACHINES, *_others(base, others)]
    return "\n".join([*lines, *_fixed(), ""])


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
    """What the other machines set otherwise, a column for each such limit."""
    for one in others:
        left_out = sorted(set(base.required) - set(one.required))
        if one.name in _LEAVE_OUT:
            yield f"- {_LEAVE_OUT[one.name]} Not required: {', '.join(left_out)}."
    yield ""
    of_card = [name for name in base.limits if name in _OF_MACHINE]
    yield from _table(
        ("profile", "machine", *of_card),
        [
            (one.name, one.title, *(_of_machine(one, name) for name in of_card))
            for one in [base, *others]
            if one.has_gpu
        ],
    )
    yield ""
    cpu = next(one for one in others if not one.has_gpu)
    yield from _table(
        ("limit of cpu", "value", "source"),
        [
            (limit.spec.name, _shown(limit), limit.source)
            for limit in limits_of(cpu)
            if cpu.limits[limit.spec.name] != base.limits.get(limit.spec.name)
        ],
    )
    yield ""


def _table(head: Cells, rows: Iterable[Cells]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def _of_machine(profile: Profile, name: str) -> str:
    """The floor or limit; of what preflight measures also the most that is possible."""
    peak = profile.hardware.peaks.get(_PEAKS.get(name, ""))
    return f"{profile.limits[name].value:g}" + (f" .. {peak.value:g}" if peak else "")


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


if __name__ == "__main__":
    print(thresholds_page(), end="")
