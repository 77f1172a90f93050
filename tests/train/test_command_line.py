"""The launch is checked as a whole before torch is loaded, and refused with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.contract import NSAError
from nsa.launch.plan import LaunchPlan, plan_launch
from tests.train.conftest import edited
from tests.train.launching import SMOKE, schedule

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}


def plan(*argv: str, env: dict[str, str] | None = None) -> LaunchPlan:
    return plan_launch(["--config", str(SMOKE), *argv], env or {})


def refusal(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(NSAError) as caught:
        plan(*argv, env=env)
    return str(caught.value)


def _block(arm: str, **toggles: str) -> tuple[str, int, dict[str, str]]:
    return arm, 5, {f"NSA_{name}": value for name, value in toggles.items()}


def _arms(*blocks: tuple[str, int, dict[str, str]], **how: int) -> str:
    return "--arms " + schedule(*blocks, **how).replace(" ", "")


@pytest.mark.parametrize(
    ("argv", "env", "parts"),
    [
        # The origin swallowed --seq-len and reported a toy's speed as that of S=2048.
        ("--seq-lenn 2048 --fast word", {},
         ["--seq-lenn: no such flag; did you mean --seq-len?", "--fast: no such flag"]),
        ("--ddp 1", {**TWO, "GROUP_WORLD_SIZE": "two"},
         ["GROUP_WORLD_SIZE='two': must be a whole number"]),
        # Report v4 ran batch 1 on two ranks.
        ("--batch-size 1", TWO,
         ["train.batch_size=1 is the global batch and must be divisible by the 2 ranks"]),
        ("--ddp 1", {}, ["torchrun --nproc_per_node=N"]),
        ("--ddp 0", TWO, ["2 separate models"]),
        ("--run-steps -1", {}, ["--run-steps -1: must be a whole number"]),
        ("--profile-steps 10 --steps 10", {}, ["needs at least 16 steps"]),
        ("--set runtime.device=cpu", {"NSA_USE_TRITON_SEL": "1"},
         ["its kernels need a CUDA device, this is cpu; set it to 0 or auto"]),
        ("", {"NSA_USE_TRITON_SEL": "yes"}, ["allowed is"]),
        ("--steps many --bogus --ddp 2 --dataset fineweb",
         {"NSA_DDP_BUCKET": "1", "NSA_LR": "fast", "NSA_ACCUM": "0", "NSA_DDP_COMPRESS": "int8",
          "RUNBOOK_RUN_TOKEN": "xyz"},
         ["--steps (train.steps)", "--bogus", "--ddp 2", "--dataset (data.dataset)",
          "NSA_DDP_BUCKET: no such toggle; did you mean NSA_DDP_BUCKET_MB?", "NSA_LR='fast'",
          "NSA_ACCUM='0': allowed is a whole number >= 1",
          "NSA_DDP_COMPRESS='int8': allowed is off, bf16, fp16", "RUNBOOK_RUN_TOKEN"]),
        (_arms(_block("a", LR="1", OPT_FUSED="2"),
               _block("b", SDPA_FLASH_ONLY="1", SDPA_NO_FLASH="1")), {},
         ["NSA_LR cannot change inside a launch", "NSA_OPT_FUSED='2'", "exclude each other",
          "3 problem(s)"]),
        (_arms(_block("")).replace('steps":5', 'stepz":1'), {},
         ["blocks.0.arm", "blocks.0.steps", "blocks.0.stepz"]),
        # The profiler and the audit never overlap.
        (_arms(*(_block(arm, SDPA_AUDIT="1") for arm in "ab"), warmup_steps=2)
         + " --profile-steps 4", {}, ["covers step 8"]),
    ],
)  # fmt: skip
def test_what_is_refused_is_all_in_one_message(
    argv: str, env: dict[str, str], parts: list[str]
) -> None:
    text = refusal(*argv.split(), env=env)
    assert [part for part in parts if part not in text] == []


def test_the_nodes_are_torchruns_agents_that_met() -> None:
    assert plan("--ddp", "1", env=TWO).place.nodes == 1
    assert plan("--ddp", "1", env={**TWO, "GROUP_WORLD_SIZE": "2"}).place.nodes == 2


def test_origin_no_config_is_refused() -> None:
    """The origin trained a 254,499-parameter toy instead."""
    with pytest.raises(NSAError, match="no config: give --config FILE, or CONFIG=FILE"):
        plan_launch(["--steps", "3"], {})


def test_config_comes_from_the_environment_too() -> None:
    assert plan_launch([], {"CONFIG": str(SMOKE)}).config.train.seq_len == 128


def test_a_link_to_resume_from_is_followed_when_it_is_read(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    link = tmp_path / "latest"
    link.symlink_to("old")
    found = plan("--resume", str(link))
    link.unlink()
    link.symlink_to("new")
    assert found.flags.resume == (tmp_path / "old").resolve()


def test_flags_win_over_toggles_and_toggles_over_the_config() -> None:
    both = plan("--seq-len", "64", env={"NSA_SEQ_LEN": "32", "NSA_LR": "0.5", "NSA_ACCUM": "3"})
    train = both.config.train
    assert (train.seq_len, train.lr, train.accumulate_grad_batches) == (64, 0.5, 3)
    assert both.loaded.sources["train.seq_len"] == "--seq-len"
    assert both.loaded.sources["train.lr"] == "NSA_LR"


def test_tokens_per_step_is_global() -> None:
    found = plan("--accum", "3", "--batch-size", "4", "--seq-len", "64", env=TWO)
    assert (found.tokens_per_step, found.per_rank_batch) == (4 * 3 * 64, 2)


def test_origin_sequential_is_named_where_batched_was_not_asked_for() -> None:
    assert plan().attention_path[0] == "sequential"
    assert plan(env={"NSA_PREFILL_BATCHED": "1"}).attention_path[0] == "batched"


@pytest.mark.parametrize(
    ("env", "on"), [(TWO, False), ({**TWO, "NSA_DDP_DISABLE_GC": "0"}, True), ({}, True)]
)
def test_gradient_checkpointing_is_off_under_ddp_unless_allowed(
    env: dict[str, str], on: bool, tmp_path: Path
) -> None:
    off = "gradient_checkpointing: false"
    path = edited(tmp_path, (off, off.replace("false", "true")))
    found = plan_launch(["--config", str(path)], env)
    assert found.checkpointing[0] is on
    assert found.model_config().gradient_checkpointing is on


def test_a_schedule_sets_the_steps() -> None:
    arms = [_block("a", DDP_BUCKET_MB="0.5"), _block("b")]
    found = plan("--arms", schedule(*arms, warmup_steps=2), "--steps", "99")
    assert found.total_steps == 14
    assert found.blocks[0].toggles.number("NSA_DDP_BUCKET_MB") == 0.5
    assert found.blocks[1].toggles.number("NSA_DDP_BUCKET_MB") == 25
    assert "--steps 99 is not used" in found.notes[0]
