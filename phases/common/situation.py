"""Where and how launches ran, and advice that fits only some of it: a GPU's is none on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runbook.config.profile import Profile
from runbook.records.evidence import LaunchEvidence

# A trainer of one's own has none of these.
_NEEDS_CONTRACT = re.compile(r"NSA_|--set\b|\btrain\.[a-z]|runbook triage")
# Requirement T12 shortens to this.
_SHORT = 1024


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a remedy has to fit. `folder` is the launch's, relative to the run's.

    `pcie`: the GPUs are not linked otherwise. `contract`: the trainer has our settings. Ranks on
    GPUs talk over NCCL, those on a CPU over gloo.
    """

    device: str
    ranks: int
    dtype: str
    seq_len: int
    pcie: bool
    folder: str
    contract: bool = True


@dataclass(frozen=True)
class Advice:
    """Words that a remedy has only where they fit."""

    words: str
    fits: Callable[[Situation], bool]


# Parts in their order, or one alone; plain words fit everywhere.
Remedy = str | Advice | tuple[str | Advice, ...]


def gpu(words: str) -> Advice:
    """For training on GPUs."""
    return Advice(words, lambda now: now.device == "cuda")


def cpu(words: str) -> Advice:
    """For training on a CPU."""
    return Advice(words, lambda now: now.device != "cuda")


def one_gpu(words: str) -> Advice:
    """For one rank on a GPU: nothing is exchanged."""
    return Advice(words, lambda now: now.device == "cuda" and now.ranks == 1)


def nccl(words: str) -> Advice:
    """For several ranks on GPUs."""
    return Advice(words, lambda now: now.device == "cuda" and now.ranks > 1)


def pcie(words: str) -> Advice:
    """For several GPUs without NVLink."""
    return Advice(words, lambda now: now.device == "cuda" and now.ranks > 1 and now.pcie)


def foreign(words: str) -> Advice:
    """For a trainer of one's own."""
    return Advice(words, lambda now: not now.contract)


def several(words: str) -> Advice:
    """For more than one rank."""
    return Advice(words, lambda now: now.ranks > 1)


def in_bf16(words: str) -> Advice:
    """For training in bf16."""
    return Advice(words, lambda now: now.dtype == "bf16")


def in_full(words: str) -> Advice:
    """For training in another type than bf16."""
    return Advice(words, lambda now: now.dtype != "bf16")


def long(words: str) -> Advice:
    """For sequences that requirement T12 would shorten."""
    return Advice(words, lambda now: now.seq_len > _SHORT)


def short(words: str) -> Advice:
    """For sequences that are no longer than that."""
    return Advice(words, lambda now: now.seq_len <= _SHORT)


def told(remedy: Remedy, now: Situation) -> str:
    """The parts that fit, in one line; empty if none does."""
    parts = remedy if isinstance(remedy, tuple) else (remedy,)
    advice = [Advice(one, lambda _: True) if isinstance(one, str) else one for one in parts]
    words = [one.words for one in advice if one.fits(now)]
    if not now.contract:
        words = [text for text in words if not _NEEDS_CONTRACT.search(text)]
    return "; ".join(words).replace("{folder}", now.folder)


def situation_of(
    profile: Profile,
    launches: Sequence[LaunchEvidence],
    evidence: Sequence[str] = (),
    *,
    ranks: int | None = None,
) -> Situation:
    """As these launches ran, by their env.json; what none of them says is as the profile plans it.
    `ranks` is for advice on one launch; that on a comparison is for all that the profile has.

    The folder is that of the launch that one of the paths of `evidence` lies in, else the first's.
    """
    env = next((dict(one.env) for one in launches if one.env), {})
    device, effective = _part(env, "device"), _part(env, "effective")
    length = effective.get("seq_len")
    folders = [one.launch.run_dir for one in launches]
    within = [folder for folder in folders if any(p.startswith(f"{folder}/") for p in evidence)]
    return Situation(
        device=str(device.get("type") or profile.hardware.device),
        ranks=ranks or profile.ranks,
        dtype=str(effective.get("dtype") or profile.workload.dtype),
        seq_len=length if isinstance(length, int) else profile.workload.seq_len,
        pcie=profile.hardware.pcie_gen is not None and not profile.hardware.nvlink,
        folder=next(iter([*within, *folders]), "the launch's folder"),
        contract=profile.own_trainer is None,
    )


def _part(env: dict[str, Any], name: str) -> dict[str, Any]:
    found = env.get(name)
    return found if isinstance(found, dict) else {}
