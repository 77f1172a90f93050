"""The launch is checked as a whole before torch is loaded, and refused with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.contract import NSAError
from nsa.launch.plan import LaunchPlan, plan_launch
from tests.factory.tables import table
from tests.train.conftest import edited
from tests.train.launching import SMOKE, schedule

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}


def plan(*argv: str, env: dict[str, str] | None = None) -> LaunchPlan:
    return plan_launch(["--config", str(SMOKE), *argv], env or {})


@table(__file__, "refused")
def test_what_is_refused_is_all_in_one_message(
    argv: str, ranks: int, env: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(NSAError) as caught:
        plan(*argv.split(), env={**(TWO if ranks == 2 else {}), **env})
    text = str(caught.value)
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
    arms = schedule(("a", 5, {"NSA_DDP_BUCKET_MB": "0.5"}), ("b", 5, {}), warmup_steps=2)
    found = plan("--arms", arms, "--steps", "99")
    assert found.total_steps == 14
    assert found.blocks[0].toggles.number("NSA_DDP_BUCKET_MB") == 0.5
    assert found.blocks[1].toggles.number("NSA_DDP_BUCKET_MB") == 25
    assert "--steps 99 is not used" in found.notes[0]
