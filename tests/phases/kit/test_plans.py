"""The printed commands are the runbook: held against the documented command lines."""

from __future__ import annotations

import json
import shlex
from collections import Counter

import pytest

from nsa.toggles import TOGGLES
from runbook.config import registry
from runbook.config.registry import select
from runbook.records import Launch
from tests.phases import builder

PHASES = registry.phases()

ONE = "NSA_PREFILL_BATCHED=1 "
TORCHRUN = "torchrun --nproc_per_node=2 scripts/train_showcase.py --dataset synthetic --ddp 1 "
NOISE = "NSA_TB_DISABLE=1 NSA_DISABLE_AUX_STATS=1 "
VALIDATED = (
    "NSA_SEL_RANGES_V2=1 NSA_DDP_COMPRESS=bf16 NSA_DDP_BUCKET_MB=25 NCCL_ALGO=Ring "
    "NCCL_PROTO=Simple "
)
# Requirement by requirement: the documented command of each phase.
DOCUMENTED = {
    # Of the two documented bucket sizes the one that is launched with (E4).
    "baseline": f"{ONE}{VALIDATED}{TORCHRUN}--steps 300",
    "bucket_sweep": f"{ONE}{TORCHRUN}--steps 600",
    "sdpa_audit": f"{ONE}NSA_SDPA_AUDIT=1 {TORCHRUN}--steps 150",
    "nvtx": f"{ONE}NSA_NVTX=1 {NOISE}{TORCHRUN}--steps 100",
    "single_gpu": f"{ONE}python scripts/train_showcase.py --dataset synthetic --ddp 0 --steps 300",
    "fused_adamw": f"{ONE}{TORCHRUN}--steps 400",
    "long_run": f"{ONE}{TORCHRUN}--steps 1200",
}


def taken_apart(command: str) -> tuple[dict[str, str], str, dict[str, str]]:
    """Environment, program and flags of a command line."""
    words = shlex.split(command)
    env: dict[str, str] = {}
    while "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    program, flags = words.pop(0), {}
    while words:
        word = words.pop(0)
        if word.startswith("--nproc_per_node="):
            flags["--nproc_per_node"] = word.partition("=")[2]
        elif word.startswith("--"):
            flags[word] = words.pop(0)
    return env, program, flags


def plan(phase: str, name: str = "a100x2_pcie4", **changes: object) -> list[Launch]:
    return PHASES[phase].plan(builder.context(name, **changes))


@pytest.mark.parametrize("phase", DOCUMENTED)
def test_a_plan_holds_everything_that_the_documents_type(phase: str) -> None:
    wanted_env, wanted_program, wanted_flags = taken_apart(DOCUMENTED[phase])
    launches = plan(phase)
    for launch in launches:
        env, program, flags = taken_apart(launch.command_line())
        assert wanted_env.items() <= env.items()
        assert program == wanted_program
        same = {key: value for key, value in wanted_flags.items() if key != "--steps"}
        if phase == "long_run":  # noise has nothing to learn
            same["--dataset"] = "markov"
        assert same.items() <= flags.items()
        assert flags["--config"] == "configs/m7c_125m_2xa100_production.yaml"
    # One GPU with its share of the batch is in no document; the scaling needs it.
    launches = [launch for launch in launches if not launch.name.startswith("share")]
    total, wanted = sum(launch.steps for launch in launches), int(wanted_flags["--steps"])
    schedule = launches[0].schedule
    if schedule is None:
        assert 0.95 * wanted <= total <= wanted
    else:
        # Interim analyses stop early: the budget pays for the first ones, hard cases go on.
        per_round = schedule.total_steps // len(schedule.rounds)
        assert min(4, len(schedule.rounds)) * per_round <= wanted <= total


def test_baseline_is_printed_as_this() -> None:
    assert [launch.command_line() for launch in plan("baseline")] == [
        "NSA_PREFILL_BATCHED=1 NSA_SEL_RANGES_V2=1 NSA_DDP_COMPRESS=bf16 NSA_DDP_BUCKET_MB=25 "
        "NSA_DDP_STATIC_GRAPH=1 NSA_DDP_FIND_UNUSED=0 NSA_DDP_DISABLE_GC=1 "
        "NSA_DISABLE_AUX_STATS=1 NSA_USE_TRITON_SEL=auto NSA_COMPILE=auto NSA_CUDA_GRAPHS=auto "
        "NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_IB_DISABLE=1 "
        "PYTORCH_ALLOC_CONF=max_split_size_mb:256,expandable_segments:True "
        "torchrun --nproc_per_node=2 -m nsa.train --config "
        "configs/m7c_125m_2xa100_production.yaml --dataset synthetic --ddp 1 --steps 60"
    ] * 5


def test_the_single_protocol_is_one_launch_of_the_documented_length() -> None:
    def steps(phase: str, name: str = "") -> list[tuple[str, int]]:
        launches = plan(phase, protocol="single")
        return [(one.env[name] if name else one.name, one.steps) for one in launches]

    assert steps("baseline") == [("run1", 300)]
    assert steps("single_gpu") == [("run1", 300), ("share1", 300)]
    sweep = steps("bucket_sweep", "NSA_DDP_BUCKET_MB")
    assert sweep == [("25", 200), ("50", 200), ("100", 200)]
    assert steps("fused_adamw", "NSA_OPT_FUSED") == [("0", 200), ("1", 200)]
    assert [one.optional for one in plan("fused_adamw", protocol="single")] == [False, True]


def test_preflight_measures_the_devices_with_the_settings_of_nccl() -> None:
    line = "NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_IB_DISABLE=1 torchrun --nproc_per_node=2"
    (_, measured), (_, alone) = plan("preflight"), plan("preflight", "h200x1")
    assert measured.command_line() == f"{line} -m nsa.ceilings --device cuda"
    assert alone.command_line() == "python -m nsa.ceilings --device cuda"


def test_every_arm_of_the_sweep_runs_once_in_every_round_in_random_order() -> None:
    (launch,) = plan("bucket_sweep")
    for order in launch.schedule.rounds:
        assert Counter(order) == {"25": 1, "50": 1, "100": 1}
    assert len(set(launch.schedule.rounds)) > 1
    assert "NSA_DDP_BUCKET_MB" not in launch.env
    assert plan("bucket_sweep") == plan("bucket_sweep")
    assert plan("bucket_sweep", seed=1) != plan("bucket_sweep", seed=2)


def test_an_a_a_run_gives_two_names_to_one_setting() -> None:
    for phase in ("bucket_sweep", "fused_adamw"):
        (launch,) = plan(phase, aa=True)
        settings = [json.dumps(values) for values in launch.schedule.settings.values()]
        assert len(settings) == 2 and len(set(settings)) == 1


def test_the_audit_tries_default_flash_only_and_no_flash_on_the_sdpa_path() -> None:
    (launch,) = plan("sdpa_audit")
    assert launch.schedule is not None and launch.schedule.steps == 50
    assert launch.schedule.rounds == (("default", "flash_only", "no_flash"),)
    arms = launch.schedule.settings
    assert "NSA_USE_TRITON_SEL" not in arms["default"]
    for arm, toggle in (("flash_only", "NSA_SDPA_FLASH_ONLY"), ("no_flash", "NSA_SDPA_NO_FLASH")):
        assert arms[arm] == {"NSA_SDPA_AUDIT": "1", toggle: "1", "NSA_USE_TRITON_SEL": "0"}


def test_nvtx_retries_with_fifty_steps() -> None:
    (launch,) = plan("nvtx")
    assert (launch.steps, launch.retry_steps) == (100, 50)
    assert "--profile-steps" in launch.argv


def test_one_process_gets_no_settings_of_ddp_and_no_checkpointing_that_ddp_lacks() -> None:
    for launch in plan("single_gpu"):
        assert not [name for name in launch.env if name.startswith(("NSA_DDP", "NCCL"))]
        assert launch.nproc == 1 and launch.argv[0] == "python"
        assert launch.config_overrides["runtime.gradient_checkpointing"] is False


def test_the_long_run_uses_what_earlier_phases_chose_unless_told_otherwise() -> None:
    (plain,) = plan("long_run")
    assert plain.env["NSA_DDP_BUCKET_MB"] == "25" and "NSA_OPT_FUSED" not in plain.env
    chosen = {"NSA_DDP_BUCKET_MB": "50", "NSA_OPT_FUSED": "1", "NSA_LR": "9"}
    (launch,) = plan("long_run", choices=chosen)
    assert (launch.env["NSA_DDP_BUCKET_MB"], launch.env["NSA_OPT_FUSED"]) == ("50", "1")
    assert "NSA_LR" not in launch.env
    assert "NSA_DDP_BUCKET_MB=50" in launch.purpose
    (told,) = plan("long_run", choices=chosen, toggles={"NSA_DDP_BUCKET_MB": "100"})
    assert told.env["NSA_DDP_BUCKET_MB"] == "100"
    assert "NSA_DDP_BUCKET_MB" not in told.purpose


def test_settings_reach_every_launch_but_the_harness_keeps_its_csv() -> None:
    changes = {
        "toggles": {"NSA_LR": "1e-4", "NSA_DISABLE_CSV_LOGS": "1"},
        "config_overrides": {"train.seed": 3},
    }
    for phase in DOCUMENTED:
        for launch in plan(phase, **changes):
            assert launch.env["NSA_LR"] == "1e-4"
            assert launch.env["NSA_DISABLE_CSV_LOGS"] == "0"
            assert launch.config_overrides["train.seed"] == 3


def test_steps_scale_multiplies_every_count_and_never_cuts_the_time_allowed() -> None:
    for phase in DOCUMENTED:
        plans = [plan(phase), plan(phase, steps_scale=0.1), plan(phase, steps_scale=2)]
        for one, small, big in zip(*plans, strict=True):
            assert small.steps < one.steps < big.steps
            assert (small.timeout_s, big.timeout_s) == (one.timeout_s, 2 * one.timeout_s)
    assert plan("long_run", steps_scale=1e-9)[0].steps == 1


@pytest.mark.parametrize("profile", ["a100x2_pcie4", "h200x1", "cpu"])
@pytest.mark.parametrize("protocol", ["blocks", "launches", "single"])
def test_plans_are_sound_on_every_profile(profile: str, protocol: str) -> None:
    where = builder.context(profile, protocol=protocol)
    for phase in PHASES.values():
        launches = phase.plan(where)
        names = [launch.name for launch in launches]
        assert len(set(names)) == len(names)
        for launch in launches:
            assert launch.phase == phase.name and launch.run_dir == f"{phase.name}/{launch.name}"
            for name, value in launch.env.items():
                assert name not in TOGGLES or TOGGLES[name].parse(value) is not None
            arms = launch.schedule.settings if launch.schedule else {}
            for settings in arms.values():
                assert all(TOGGLES[name].arm for name in settings)


def test_the_cpu_profile_asks_for_no_nccl_and_one_rank_for_no_second_gpu() -> None:
    for phase in select("all"):
        for launch in phase.plan(builder.context("cpu")):
            assert not [name for name in launch.env if name.startswith("NCCL")]
        for launch in phase.plan(builder.context("h200x1")):
            assert launch.nproc == 1


# A profile may name another trainer: every training launch starts it, and nothing else changes.
