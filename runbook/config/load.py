"""Reading a profile, with everything that is wrong told at once.

Those of GPU machines are made by a rule: the card's data sheet, how many, and what links them.
`a100x2_pcie4` is two A100 80 GB on PCIe generation 4, `h100x8_nvlink` eight H100 modules, `b200x1`
one B200. `configs/machines/cards.yaml` has what the data sheets say, `gpu.yaml` what all share, and
the floors of what preflight measures as shares of the data sheet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_core import ErrorDetails

from runbook.config import Limit, LimitSpec, Profile, registry
from runbook.config.extends import (
    SHOWN_GPUS,
    gpus_by_name,
    key_problem,
    merged,
    read_mapping,
    validated,
    whole_document,
    with_preset,
)
from runbook.config.settings import override_problems, variable_problems
from runbook.errors import UsageError, choice_for, did_you_mean
from runbook.files import data_path, shipped_names
from runbook.records.measurement import Record


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles in alphabetical order, of several GPUs those of two."""
    return tuple(one for one in _every_name() if gpus_by_name(one) <= SHOWN_GPUS)


def is_shipped(name: str) -> bool:
    """Is this the name of a shipped profile, of any number of GPUs?"""
    return name in _every_name()


def _every_name() -> list[str]:
    return sorted((*shipped_names(data_path("configs") / "profiles"), *machines()))


def load_profile(name_or_path: str) -> Profile:
    """Load a shipped profile by name, or one's own by path (it ends in .yaml or has a slash).

    A profile may say `extends: NAME` and then only what differs; null drops an inherited key.
    `preset: NAME` gives it the variables of a preset, below those of its own `env`.
    Raises UsageError that lists every wrong key and value.
    """
    folder = data_path("configs") / "profiles"
    document = whole_document("profile", name_or_path, folder, made=machines(), prepare=_prepared)
    profile = load_profile_document(document, where=name_or_path)
    # Asked of files only: the document of a record says `gated` of every limit.
    idle = [one.spec.name for one in limits_of(profile) if not one.gated]
    if idle := [name for name in idle if document["limits"][name].get("gated")]:
        why = "a limit on times decides only with throughput_gated: true, which is false here"
        raise UsageError([f"{name_or_path}: limits.{name}.gated: {why}" for name in idle])
    return profile


def load_profile_document(document: Mapping[str, object], *, where: str = "profile") -> Profile:
    """Validate a whole profile, such as the one kept in run.json. Raises UsageError."""
    profile = validated(Profile, document, where, told=_problem)
    problems = _unknown_references(profile)
    if problems:
        raise UsageError([f"{where}: {text}" for text in problems])
    return profile


def limits_of(profile: Profile) -> list[Limit]:
    """The limits that a profile sets, in force, in the order of the phases."""
    known = registry.known_limits(profile.phases)
    return [profile.limit(spec) for spec in known.values() if spec.name in profile.limits]


def _prepared(data: dict[str, Any], path: Path) -> dict[str, Any]:
    # One key in a file, two in a profile: a module's name, or how a program is started.
    if isinstance(data.get("trainer"), dict):
        data["own_trainer"] = data.pop("trainer")
    return with_preset(data, str(path))


def _problem(detail: ErrorDetails) -> str:
    if detail["loc"] == ("scope",) and detail["type"] == "extra_forbidden":
        return "scope: leave it out; what a verdict is about is derived from what really ran"
    place, name, *inside = (*map(str, detail["loc"]), "", "")
    if detail["type"] == "missing" and place in ("phases", "limits") and len(inside) > 2:
        # Of a name that is none no key is missing.
        known: Mapping[str, object] = registry.phases()
        known = known if place == "phases" else registry.known_limits(known)
        unknown = _unknown(place, name, known)
        if unknown and "stage" not in detail["input"]:
            return unknown
    return key_problem(detail, Profile).removeprefix("own_")


def _unknown(place: str, name: str, known: Mapping[str, object]) -> str:
    """That this key of `phases` or `limits` is none, with what is meant; empty if it is known."""
    return "" if name in known else f"{place}.{name}: no such {place[:-1]}{choice_for(name, known)}"


def _unknown_references(profile: Profile) -> list[str]:
    """Phases, limits and required checks by names that exist nowhere, or that are missing."""
    known = registry.phases_of(profile.phases)
    problems = [text for name in profile.phases if (text := _unknown("phases", name, known))]
    needed = registry.standard_phases()
    problems += [
        f"phases.{name}: missing; it needs timeout_s and source"
        for name in needed
        if name not in profile.phases
    ]
    problems += _limit_problems(profile, registry.known_limits(known, profile.phases))
    problems += _setting_problems(profile)
    return problems or _unknown_checks(profile)


def _limit_problems(profile: Profile, known: Mapping[str, LimitSpec]) -> list[str]:
    """What is wrong with a profile's limits: unknown, missing, or against their declaration."""
    given = profile.limits
    problems = [text for name in given if (text := _unknown("limits", name, known))]
    for name, spec in registry.known_limits(profile.phases, profile.phases).items():
        if name not in given and not spec.toggle:
            problems.append(f"limits.{name}: missing")
    for name, spec in ((name, known[name]) for name in given if name in known):
        if spec.toggle:
            problems.append(f"limits.{name}: set {spec.toggle} instead, which owns the value")
        else:
            problems += [f"limits.{name}.{text}" for text in spec.problems(given[name])]
    return problems


def _setting_problems(profile: Profile) -> list[str]:
    """Variables, config keys and arms that `--set` would refuse."""
    own = profile.variables
    problems = [f"env.{text}" for text in variable_problems(own)]
    phases = registry.phases_of(profile.phases)
    for name, settings in profile.phases.items():
        place = f"phases.{name}"
        added = settings.variables
        # A phase's variables are judged beside the profile's, which a launch sets too.
        problems += [
            f"{place}.env.{text}"
            for text in (variable_problems(own | added) if added else [])
            if f"env.{text}" not in problems
        ]
        overrides = override_problems(settings.config_overrides)
        problems += [f"{place}.config_overrides.{text}" for text in overrides]
        toggle = phases[name].arms_toggle if name in phases else ""
        problems += [
            f"{place}.arms: {text}"
            for arm in (settings.arms if toggle else ())
            for text in variable_problems({toggle: arm})
        ]
    return problems


def _unknown_checks(profile: Profile) -> list[str]:
    known = registry.known_checks(profile)
    problems = [
        f"required: no check {name!r}{did_you_mean(name, known)}"
        for name in profile.required
        if name not in known
    ]
    own = profile.own_trainer
    if own is None or problems:
        return problems
    answered = registry.own_checks(profile)
    if odd := [name for name in profile.required if name not in answered]:
        problems.append(
            f"required: {own.name} is a trainer of your own and cannot answer {', '.join(odd)}; "
            f"it can answer {', '.join(answered)}"
        )
    return problems


# The most cards of one machine.
MOST_CARDS = 8
# The data sheet's peak over a measured product, which is 75 to 85 % of it.
_OF_PRODUCT = 1.2


class Card(Record):
    """A kind of card, as cards.yaml says it; rates in TFLOP/s and GB/s."""

    title: str
    seen: str
    gpu_name: str
    memory_gib: float = Field(gt=0)
    tflops: float = Field(gt=0)
    tflops_source: str
    at_highest_clock: float = Field(gt=0)
    clock_source: str
    copy_gb_s: tuple[float, float]
    copy_source: str
    nvlink_gb_s: float = Field(gt=0)
    joined: str
    links: tuple[str, ...]
    host_pcie: tuple[int, int]
    mfu_floor: tuple[float, float]
    mfu_source: str

    def named(self, name: str) -> bool:
        """Is this what nvidia-smi calls the card?"""
        return re.search(self.seen, name) is not None

    def link_of(self, name: str, generations: Sequence[int | None]) -> str:
        """What links several cards of this name, whose slots have these PCIe generations."""
        if self.joined and self.joined in name:
            return "nvlink"
        by_pcie = sorted(link for link in self.links if link != "nvlink")
        slowest = f"pcie{min(one or 0 for one in generations)}"
        return slowest if slowest in by_pcie else by_pcie[0]


def machines() -> Mapping[str, Callable[[], dict[str, Any]]]:
    """What makes the profile's document of every machine, by its name."""
    return {
        name: partial(_machine, name, key, count, link)
        for key in cards()
        for count in range(1, MOST_CARDS + 1)
        for name, link in _names(key, count)
    }


def _names(key: str, count: int) -> Iterator[tuple[str, str]]:
    """Names of machines of so many cards of a kind, each with what links them."""
    if count == 1:
        yield f"{key}x1", ""
    else:
        yield from ((f"{key}x{count}_{link}", link) for link in cards()[key].links)


def seen_as(names: Sequence[str], generations: Sequence[int | None]) -> str | None:
    """The profile of cards that nvidia-smi calls so, or None if there is none for them."""
    for key, card in cards().items():
        if all(card.named(name) for name in names) and 1 <= len(names) <= MOST_CARDS:
            if len(names) == 1:
                return f"{key}x1"
            return f"{key}x{len(names)}_{card.link_of(names[0], generations)}"
    return None


def _machine(name: str, key: str, count: int, link: str) -> dict[str, Any]:
    card, parts = cards()[key], _parts()
    generation = int(link[4:]) if link.startswith("pcie") else None
    shared = with_preset(parts["every"], "gpu.yaml")
    document = merged(shared, _of_card(name, card, count, generation))
    fitting = ["one"] if count == 1 else [link[:4] if generation else link, link]
    fitting += ["pcie_shared"] if generation and count > 2 else []
    left_out: list[str] = []
    for fit in dict.fromkeys(fitting):
        part = dict(parts.get(fit, {}))
        left_out += part.pop("not_required", ())
        document = merged(document, part)
    document["required"] = [one for one in document["required"] if one not in left_out]
    document["limits"] = {
        name: _of_rate(limit, card, generation) for name, limit in document["limits"].items()
    }
    return document


@lru_cache(maxsize=1)
def cards() -> Mapping[str, Card]:
    """The cards by their part of a profile's name. Raises UsageError for a damaged file."""
    path = data_path("configs") / "machines" / "cards.yaml"
    return {
        key: validated(Card, one, f"{path}: {key}")
        for key, one in read_mapping("card", path).items()
    }


@lru_cache(maxsize=1)
def _parts() -> Mapping[str, Any]:
    return read_mapping("profile", data_path("configs") / "machines" / "gpu.yaml")


def _of_card(name: str, card: Card, count: int, generation: int | None) -> dict[str, Any]:
    """What follows from the data sheet, the number of cards and their link."""
    how = f"PCIe generation {generation}" if generation else "NVLink"
    floor = card.mfu_floor[count > 1]
    document = {
        "name": name,
        "title": f"{count} x {card.title}" + (f", {how}" if count > 1 else ""),
        "ranks": count,
        "hardware": _hardware(card, count, generation),
        "limits": {
            "mfu_floor": {"value": floor, "source": card.mfu_source},
            "mfu_of_ceiling": {
                "value": round(floor * _OF_PRODUCT, 3),
                "source": f"choice: {_OF_PRODUCT:g} times mfu_floor; a measured product is 75 to "
                "85 % of the peak",
            },
        },
    }
    if count <= 2:
        return document
    batch = f"requirement C2, one sequence per GPU, of {count} GPUs"
    return {
        **document,
        "env": {"NSA_BATCH_SIZE": {"value": str(count), "source": batch}},
        "workload": {
            "global_batch": count,
            "source": f"requirements G1, C2 and C7; one sequence for each of {count} GPUs",
        },
    }


def _hardware(card: Card, count: int, generation: int | None) -> dict[str, Any]:
    host = generation or card.host_pcie[1]
    slot = f"PCIe {host}.0 x16"
    both = f"NVLink, {card.nvlink_gb_s:,.0f} GB/s in both directions"
    exchange = (card.nvlink_gb_s / 2, f"{card.title} data sheet: {both}")
    if generation:
        exchange = (_pcie(host), f"{slot}: each of two ranks sends all its bytes once")
    elif count == 1:
        exchange = (exchange[0], f"{exchange[1]}; one rank exchanges nothing")
    peaks = {
        "matmul": (card.at_highest_clock, card.clock_source),
        "memory_copy": (card.copy_gb_s[generation is None], card.copy_source),
        "host_copy": (
            _pcie(host),
            f"PCI-SIG: {slot}, {2**host} GT/s of 128b/130b in one direction",
        ),
        "all_reduce": exchange,
    }
    return {
        "gpus": count,
        "gpu_name": card.gpu_name,
        "gpu_memory_gib": card.memory_gib,
        "pcie_gen": generation,
        "peak_tflops": card.tflops,
        "peak_source": card.tflops_source,
        "peaks": {what: {"value": most, "source": why} for what, (most, why) in peaks.items()},
        "source": "; ".join(
            [f"{card.title} data sheet", *(["requirements P5, P6 and P7"] if generation else [])]
        ),
    }


def _of_rate(limit: dict[str, Any], card: Card, generation: int | None) -> dict[str, Any]:
    """A limit that is a share of a rate of the card, as a value.

    Cut down to two digits and a half, from 1,000 on to tens.
    """
    if "share" not in limit:
        return limit
    host = generation or card.host_pcie[0]
    rates = {
        "memory_gib": card.memory_gib,
        "tflops": card.tflops,
        "copy": card.copy_gb_s[0],
        "host": _pcie(host),
        "link": _pcie(host) if generation else card.nvlink_gb_s / 2,
    }
    share, most = limit["share"], rates[limit["of"]]
    step = min(10, 10 ** (math.floor(math.log10(share * most)) - 1) / 2)
    told = limit["source"].format(
        share=f"{100 * share:.0f}",
        most=most,
        host=host,
        half_clock=100 * 0.85 * card.at_highest_clock / 2 / card.tflops,
    )
    return {"value": round(math.floor(share * most / step + 1e-9) * step, 6), "source": told}


def _pcie(generation: int) -> float:
    """GB/s that a slot of 16 lanes takes in one direction: GT/s x 16 lanes x 128/130 / 8 bits."""
    return {3: 15.75, 4: 31.5, 5: 63.0}[generation]
