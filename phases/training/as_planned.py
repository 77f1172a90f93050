"""Did what a launch was planned with really run, and take effect?

Its env.json against the plan and the profile, and each toggle by the ranks' reports: nothing is
concluded from one that did nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nsa.contract import INSTEAD, proof_text
from nsa.settings import CONFIG_TOGGLES, OVERRIDES
from nsa.toggles import TOGGLES, meaning
from phases.kit.case import Case, once
from phases.kit.finding import Finding, invalid, passed
from phases.kit.measure import file_value
from phases.machine.nodes import other_nodes
from phases.training.plausible import other_checkpoint
from runbook.config.plan import stands_on_go
from runbook.folder.launch.documents import recorded_toggles
from runbook.records import Reason
from runbook.records.evidence import LaunchEvidence
from runbook.records.launch import DATASET_FLAG, option


@once
def as_planned(case: Case, name: str) -> Finding:
    """INVALID where checkpoint, config, toggles, data, model, nodes or software are others."""
    launch, env = case.launch(name), case.env(name)
    if other := other_checkpoint(launch, env):
        paths = (launch.path("env"),)
        return invalid(Reason.MISMATCH, f"{name}: {other}", evidence=paths, topic="resume")
    workload, config = _workload_problems(case, env), list(_config_problems(launch, env))
    problems = [
        *_plan_problems(launch, env),
        *workload,
        *data_problems(launch, env),
        *config,
        *_model_problems(case, env),
        *_other_software(case, launch, env),
    ]
    if problems:
        reason = f"{name}: {'; '.join(problems)}"
        topic = "workload" if problems == workload else "other_config" if config else ""
        if other_folder(case, launch, env):
            topic = "two_folders"
        elif not launch.launch.commit and _other_digest(case, env.get("package") or {}):
            topic = "changed_code"
        return invalid(Reason.MISMATCH, reason, evidence=(launch.path("env"),), topic=topic)
    work = case.profile.workload_of(case.phase)
    batch = f"global batch {work.global_batch}, accumulation {work.accumulation}"
    reason = f"S={work.seq_len}, {batch}, {work.dtype}"
    digest = str(env.get("config_sha256"))
    value = file_value(launch, "env", "config_sha256", digest)
    return passed(reason, measurement=value)


def _plan_problems(launch: LaunchEvidence, env: dict[str, Any]) -> Iterator[str]:
    token, expected = env.get("run_token"), launch.result.run_token
    if expected and token != expected:
        yield "env.json is of another launch"
    if env.get("world_size") != launch.launch.nproc:
        yield f"world size: wanted {launch.launch.nproc}, got {env.get('world_size')}"
    yield from other_nodes(launch, env)
    got = recorded_toggles(env)
    for key, text in launch.launch.env.items():
        if (
            key in TOGGLES
            and TOGGLES[key].reader == "trainer"
            and got.get(key) != TOGGLES[key].parse(text)
        ):
            yield f"{key}: wanted {text}, got {got.get(key)}"


def _workload_problems(case: Case, env: dict[str, Any]) -> list[str]:
    work = case.profile.workload_of(case.phase)
    got = {**(env.get("effective") or {}), "device": (env.get("device") or {}).get("type")}
    wanted = {
        "seq_len": work.seq_len,
        "global_batch": work.global_batch,
        "accumulation": work.accumulation,
        "dtype": work.dtype,
        "tokens_per_step": work.tokens_per_step,
        "device": case.profile.hardware.device,
    }
    return [
        f"{key}: wanted {value}, got {got.get(key)}"
        for key, value in wanted.items()
        if got.get(key) != value
    ]


def data_problems(launch: LaunchEvidence, env: dict[str, Any]) -> list[str]:
    """The launch trained on another data set than its command names, and why if it says so."""
    asked = option(launch.launch.argv, DATASET_FLAG)
    got = (env.get("effective") or {}).get("dataset")
    if not asked or got == asked:
        return []
    said = [str(note) for note in env.get("notes") or () if asked in str(note)]
    why = f" ({said[0]})" if said else ""
    return [f"dataset: wanted {asked}, got {got}{why}"]


def _config_problems(launch: LaunchEvidence, env: dict[str, Any]) -> Iterator[str]:
    """A key of the config file, or of the plan's changes of it, that the trainer did not take.

    Flags and toggles go over the file, and are asked about elsewhere. The schedule of the learning
    rate is as long as the file says, or as what the launch was told to train.
    """
    if launch.config is None:
        return
    told = launch.launch
    meant = {
        f"{section}.{key}": value
        for section, values in launch.config.items()
        for key, value in (values if isinstance(values, Mapping) else {}).items()
    } | told.config_overrides
    over = {key for name, key in CONFIG_TOGGLES.items() if name in told.env}
    over |= {key for key, (flag, *_) in OVERRIDES.items() if option(told.argv, flag)}
    config = env.get("config") or {}
    for name, value in meant.items():
        section, _, key = name.partition(".")
        got = (config.get(section) or {}).get(key)
        if name not in over and got != value:
            yield f"{name}: the config says {value}, it trained with {got}"
    effective = env.get("effective") or {}
    run_steps = int(option(told.argv, "--run-steps") or 0)
    lengths = meant.get("train.steps"), run_steps, effective.get("steps")
    wanted = max(steps for steps in lengths if isinstance(steps, int))
    if effective.get("schedule_steps") != wanted:
        yield f"schedule: wanted {wanted} steps, got {effective.get('schedule_steps')}"


def _model_problems(case: Case, env: dict[str, Any]) -> list[str]:
    """A plan behind a GO trains the model of that run, by its number of parameters."""
    plan, count = case.profile.plan, (env.get("effective") or {}).get("n_params")
    if plan is None or plan.parameters in (0, count) or not stands_on_go(case.profile, case.phase):
        return []
    behind = plan.go.partition(":")[0]
    return [f"parameters: {plan.parameters} in {behind}, which was GO, got {count}"]


# Versions of env.json, and the facts of preflight that tell the same.
_SAME = {
    "torch": "torch.version",
    "cuda": "torch.cuda",
    "nccl": "torch.nccl",
    "driver": "gpu.driver",
}
# Where there are GPUs these have to be told. A container may hide the file from which a process
# reads the driver; nvidia-smi and NVML tell it.
_ALWAYS_TOLD = ("torch", "cuda", "nccl")


def _other_software(case: Case, launch: LaunchEvidence, env: Mapping[str, Any]) -> Iterator[str]:
    """`torch: preflight saw 2.13.0, it ran on 2.9.0` for each version that is another.

    Nothing where preflight is not part of the run. On a profile with GPUs a version that env.json
    does not tell counts as another. The package under test is not the one that the run began with,
    or that preflight saw, either; a commit's launch has its own.
    """
    versions, package = env.get("versions") or {}, env.get("package") or {}
    told = [(name, fact, versions.get(name), "it ran on") for name, fact in _SAME.items()]
    if folders := other_folder(case, launch, env):
        yield folders
    elif not launch.launch.commit:
        if ran := _other_digest(case, package):
            began = f"{case.context.package} as the run began"
            yield f"package.sha256: {began}, it ran {ran}: code was changed"
        told.append(("package.sha256", "package.sha256", package.get("sha256"), "it ran"))
    asked = launch.devices_before or {}
    counted = asked.get("driver") if asked.get("source") else None
    told.append(("driver", _SAME["driver"], counted, "the launch began with"))
    for name, fact, value, how in told:
        seen = case.told(fact)
        owed = name in _ALWAYS_TOLD and case.profile.has_gpu
        if seen not in (None, value) and (value is not None or owed):
            yield f"{name}: preflight saw {seen}, {how} {value}"


def other_folder(case: Case, launch: LaunchEvidence, env: Mapping[str, Any]) -> str:
    """That launch and harness loaded the package under test from two folders; empty if not.

    Without preflight only another digest shows it: the same files may lie in two places. A
    commit's launch has its own folder.
    """
    package = env.get("package") or {}
    ours, theirs = case.context.package_path, str(package.get("path") or "")
    if (seen := case.told("package.path")) is not None:
        ours = str(seen)
    elif not _other_digest(case, package):
        return ""
    if launch.launch.commit or not (ours and theirs) or ours == theirs:
        return ""
    return f"nsa was loaded from two folders: the harness has {ours}, the launch ran {theirs}"


def _other_digest(case: Case, package: Mapping[str, Any]) -> str:
    """The digest of the package that ran where the run began with another one, as long as that."""
    began = case.context.package
    ran = str(package.get("sha256") or "")[: len(began)]
    return ran if ran != began else ""


# -- toggles -------------------------------------------------------------------------------------


def toggles_in_force(env: Mapping[str, str]) -> dict[str, str]:
    """The trainer toggles of a launch that must prove themselves."""
    return {
        name: value
        for name, value in env.items()
        if name in TOGGLES and TOGGLES[name].reader == "trainer" and not TOGGLES[name].passive
    }


def effect_problem(
    launch: LaunchEvidence, toggle: str, value: str, *, arm: str | None = None
) -> str:
    """Why this toggle is not proven to have taken effect, or an empty string.

    Proven means: at least one rank reports it, and no report says otherwise.
    """
    where = f" in arm {arm}" if arm else ""
    reports = launch.effects(toggle, arm=arm)
    # Two spellings may mean the same: `50` and `50.0`, `1` and `True`.
    wanted = meaning(toggle, {toggle: value})
    found = [one for one in reports if meaning(toggle, {toggle: str(one.value)}) == wanted]
    if not found:
        others = sorted({effect.value for effect in reports})
        seen = f"; reported for {', '.join(others)}" if others else ""
        return f"{toggle}={value}{where}: no proof that it took effect{seen}"
    refused = [effect for effect in found if effect.took_effect is False]
    if refused:
        ranks = [
            one.rank for one in launch.ranks if any(it is r for it in one.effects for r in refused)
        ]
        # One rank alone may run another path: its own file says so.
        of_rank = f" on rank {', '.join(map(str, ranks))}" if len(ranks) < len(launch.ranks) else ""
        told = proof_text(refused[0].evidence)
        return f"{toggle}={value}{where}: did nothing{of_rank} ({told})"
    if not any(effect.took_effect for effect in found):
        return f"{toggle}={value}{where}: the trainer cannot tell whether it took effect"
    return ""


def slow_way(launch: LaunchEvidence, toggle: str) -> str:
    """What ran, and why, where a toggle left the choice to the trainer and the fast way did not
    run; an empty string where it did.
    """
    told = [one.evidence for one in launch.effects(toggle) if isinstance(one.evidence, Mapping)]
    why = dict.fromkeys(str(evidence[INSTEAD]) for evidence in told if INSTEAD in evidence)
    return f"{toggle}=auto is {'; '.join(why)}" if why else ""
