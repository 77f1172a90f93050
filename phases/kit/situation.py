"""Where and how launches ran: what a remedy has to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runbook.config.profile import Profile
from runbook.records.evidence import LaunchEvidence


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
