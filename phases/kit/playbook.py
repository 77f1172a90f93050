"""What to do about each kind of failure: `playbook.yaml`, as far as it fits where it is said.

A finding that names its topic takes that one's remedy: it knows the fault, such as the end of a
launch. Any other row that is not PASS takes the remedy of its own topic if there is one, else that
of its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from phases.kit import table
from runbook.config import Profile
from runbook.records import Reason
from runbook.records.evidence import LaunchEvidence
from runbook.records.outcome import STEP

# A trainer of one's own has none of these.
_NEEDS_CONTRACT = re.compile(
    r"NSA_|--set\b|\btrain\.[a-z]|runbook (triage|stacks)|stackdump|training\.csv|env\.json"
    r"|git checkout"
)
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

    @property
    def on_gpu(self) -> bool:
        """Do the ranks compute on GPUs?"""
        return self.device == "cuda"

    def filled(self, words: str) -> str:
        """The words with what only the situation knows."""
        return words.replace("{folder}", self.folder).replace("{lower_lr}", self.lower_lr)


# Where a part of a remedy is said, by what its `when` is called.
FITS: Mapping[str, Callable[[Situation], bool]] = {
    "": lambda _: True,
    "gpu": lambda now: now.on_gpu,
    "cpu": lambda now: not now.on_gpu,
    "one_gpu": lambda now: now.on_gpu and now.ranks == 1,
    "nccl": lambda now: now.on_gpu and now.ranks > 1,
    "pcie": lambda now: now.on_gpu and now.ranks > 1 and now.pcie,
    "several": lambda now: now.ranks > 1,
    "foreign": lambda now: not now.contract,
    "knowing_lr": lambda now: bool(now.lower_lr),
    "not_knowing_lr": lambda now: not now.lower_lr,
    "in_bf16": lambda now: now.dtype == "bf16",
    "in_full": lambda now: now.dtype != "bf16",
    "long": lambda now: now.seq_len > _SHORT,
    "short": lambda now: now.seq_len <= _SHORT,
}


@dataclass(frozen=True)
class Advice:
    """Words that a remedy has where they fit.

    What is typed first, where the words have that: a `command`, or the phase again with `settings`
    that tell more.
    """

    say: str
    when: str = ""
    command: str = ""
    settings: Sequence[str] = ()


Remedy = tuple[Advice, ...]


@dataclass(frozen=True)
class Playbook:
    """Every remedy, by the topic that a row or finding names, and by reason.

    `fixed_first`: these reasons before what a row is about.
    """

    by_topic: Mapping[str, Remedy]
    by_reason: Mapping[Reason, Remedy]
    fixed_first: frozenset[Reason]


@cache
def playbook() -> Playbook:
    """The shipped playbook, read once."""
    document = table("playbook")
    topics = {name: _remedy(told) for name, told in document["topics"].items()}
    reasons = {
        Reason(name): topics[told["topic"]] if isinstance(told, dict) else _remedy(told)
        for name, told in document["reasons"].items()
    }
    return Playbook(topics, reasons, frozenset(map(Reason, document["fixed_first"])))


def _remedy(told: Any) -> Remedy:
    parts = told if isinstance(told, list) else [told]
    return tuple(Advice(one) if isinstance(one, str) else Advice(**one) for one in parts)


def fitting(remedy: Remedy, now: Situation) -> list[Advice]:
    """The parts that fit, in their order."""
    fits = [one for one in remedy if FITS[one.when](now)]
    return fits if now.contract else [x for x in fits if not _NEEDS_CONTRACT.search(x.say)]


def told(remedy: Remedy, now: Situation) -> str:
    """The parts that fit, in one line; empty if none does."""
    return STEP.join(now.filled(one.say) for one in fitting(remedy, now))


def remedy_for(topic: str, code: Reason, now: Situation, *, own: str = "") -> Remedy:
    """The remedy of what a finding names as its `own` topic, else of its row's topic or reason.

    Where nothing of a topic fits the situation, what the reason asks for.
    """
    book = playbook()
    its = own or (topic if topic in book.by_topic and code not in book.fixed_first else "")
    remedy = book.by_topic[its] if its else ()
    return remedy if fitting(remedy, now) else book.by_reason.get(code, ())


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
    device, effective = env.get("device") or {}, env.get("effective") or {}
    folders = [one.launch.run_dir for one in launches]
    within = [folder for folder in folders if any(p.startswith(f"{folder}/") for p in evidence)]
    return Situation(
        device=str(device.get("type") or profile.hardware.device),
        ranks=ranks or profile.ranks,
        dtype=str(effective.get("dtype") or profile.workload.dtype),
        seq_len=effective.get("seq_len") or profile.workload.seq_len,
        pcie=profile.hardware.pcie_gen is not None and not profile.hardware.nvlink,
        folder=next(iter([*within, *folders]), "the launch's folder"),
        contract=profile.own_trainer is None,
        lower_lr=_lower_lr(env, launches),
    )


def _lower_lr(env: Mapping[str, Any], launches: Sequence[LaunchEvidence]) -> str:
    """A tenth of the config's rate; empty if a launch had another one."""
    given = [{*one.launch.config_overrides, *one.launch.env} for one in launches]
    rate = ((env.get("config") or {}).get("train") or {}).get("lr")
    if rate is None or any(names & {"train.lr", "NSA_LR"} for names in given):
        return ""
    return f"{rate / 10:.3g}"
