"""Where and how launches ran, and advice that fits only some of it: a GPU's is none on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runbook.config.profile import Profile
from runbook.records.evidence import LaunchEvidence
from runbook.records.outcome import STEP

# A trainer of one's own has none of these.
_NEEDS_CONTRACT = re.compile(r"NSA_|--set\b|\btrain\.[a-z]|runbook triage")
# Requirement T12 shortens to this.
_SHORT = 1024


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a remedy has to fit. `folder` is the launch's, relative to the run's.

    `lower_lr` is a tenth of the config's learning rate; empty where that is not known.

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
    lower_lr: str = ""


@dataclass(frozen=True)
class Advice:
    """Words that a remedy has only where they fit.

    What is typed first, where the words have that: a `command`, or the phase again with `settings`
    that tell more.
    """

    words: str
    fits: Callable[[Situation], bool]
    command: str = ""
    settings: tuple[str, ...] = ()


# Parts in their order, or one alone; plain words fit everywhere.
Remedy = str | Advice | tuple[str | Advice, ...]


def anywhere(words: str, *, command: str = "", settings: Sequence[str] = ()) -> Advice:
    """For all, with what is typed first."""
    return Advice(words, lambda _: True, command=command, settings=tuple(settings))


def gpu(words: str, *, command: str = "") -> Advice:
    """For training on GPUs."""
    return Advice(words, lambda now: now.device == "cuda", command=command)


def cpu(words: str) -> Advice:
    """For training on a CPU."""
    return Advice(words, lambda now: now.device != "cuda")


def one_gpu(words: str) -> Advice:
    """For one rank on a GPU: nothing is exchanged."""
    return Advice(words, lambda now: now.device == "cuda" and now.ranks == 1)


def nccl(words: str, *, settings: Sequence[str] = ()) -> Advice:
    """For several ranks on GPUs."""
    return Advice(words, _of_several_gpus, settings=tuple(settings))


def _of_several_gpus(now: Situation) -> bool:
    return now.device == "cuda" and now.ranks > 1


def pcie(words: str) -> Advice:
    """For several GPUs without NVLink."""
    return Advice(words, lambda now: now.device == "cuda" and now.ranks > 1 and now.pcie)


def foreign(words: str) -> Advice:
    """For a trainer of one's own."""
    return Advice(words, lambda now: not now.contract)


def knowing_lr(words: str, *, settings: Sequence[str]) -> Advice:
    """Where the learning rate of the config is known."""
    return Advice(words, lambda now: bool(now.lower_lr), settings=tuple(settings))


def not_knowing_lr(words: str) -> Advice:
    """Where it is not, or where a person changed it."""
    return Advice(words, lambda now: not now.lower_lr)


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


def fitting(remedy: Remedy, now: Situation) -> list[Advice]:
    """The parts that fit, in their order."""
    parts = remedy if isinstance(remedy, tuple) else (remedy,)
    advice = [anywhere(one) if isinstance(one, str) else one for one in parts]
    fits = [one for one in advice if one.fits(now)]
    return fits if now.contract else [x for x in fits if not _NEEDS_CONTRACT.search(x.words)]


def told(remedy: Remedy, now: Situation) -> str:
    """The parts that fit, in one line; empty if none does."""
    return STEP.join(filled(one.words, now) for one in fitting(remedy, now))


def filled(words: str, now: Situation) -> str:
    """The words with what only the situation knows."""
    return words.replace("{folder}", now.folder).replace("{lower_lr}", now.lower_lr)


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
        lower_lr=_lower_lr(env, launches),
    )


def _lower_lr(env: Mapping[str, Any], launches: Sequence[LaunchEvidence]) -> str:
    """A tenth of the config's rate; empty if a launch had another one."""
    given = [{*one.launch.config_overrides, *one.launch.env} for one in launches]
    rate = _part(_part(env, "config"), "train").get("lr")
    if not isinstance(rate, float) or any(names & {"train.lr", "NSA_LR"} for names in given):
        return ""
    return f"{rate / 10:.3g}"


def _part(env: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = env.get(name)
    return found if isinstance(found, dict) else {}
