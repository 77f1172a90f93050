"""Arms inside one launch: each takes effect, a failing one is skipped by all, `.ENOUGH` ends it."""

from __future__ import annotations

import pytest

from runbook.accounts.settings import bucket_account
from runbook.folder.launch.rank_log import read_heartbeats
from tests.train.launching import Launch

pytestmark = pytest.mark.e2e

RUN = ["small", "big", "flash", "noflash", "bf16"]


def test_it_ends_at_enough_on_both_ranks(arms: Launch) -> None:
    assert arms.process.returncode == 0, arms.text()
    for rank in range(2):
        assert arms.exit(rank)["reason"] == "enough"
        assert arms.beats(rank)[-2]["event"] == "enough"


def test_rows_are_the_schedules_with_warm_up_marked(arms: Launch) -> None:
    rows = arms.rows()
    seen = [(row["arm"], int(row["block"]), int(row["warmup"])) for row in rows]
    expected = []
    for arm, block, steps in zip(RUN, (0, 1, 3, 4, 5), (5, 5, 5, 5, 20), strict=True):
        expected += [(arm, block, 1)] * 3 + [(arm, block, 0)] * steps
    assert seen == expected
    assert [int(row["step"]) for row in rows] == list(range(1, len(expected) + 1))


def test_an_arm_that_cannot_run_is_skipped_by_all_ranks(arms: Launch) -> None:
    for rank in range(2):
        failed = arms.beats(rank, "arm_failed")
        assert [beat["arm"] for beat in failed] == ["triton"]
        assert "Triton needs a CUDA device, this is cpu" in failed[0]["error"]


def test_every_arms_buckets_are_those_of_its_cap_and_of_no_other(arms: Launch) -> None:
    """Arm bf16 looks for unused parameters, so it keeps the buckets that DDP begins with."""
    env = arms.env()
    for rank in range(2):
        log = read_heartbeats(
            arms.run_dir / f"heartbeat_rank{rank}.jsonl", rank=rank, relative_to=arms.run_dir
        )
        assert not log.problems
        assert bucket_account((log,), env) == []
        for block in env["arms"]["blocks"]:
            cap = float(block["set"].get("NSA_DDP_BUCKET_MB", 25.0))
            block["set"]["NSA_DDP_BUCKET_MB"] = str(cap / 2 if cap < 25 else 0.5)
        told = {text.partition(":")[0] for text in bucket_account((log,), env)}
        assert told == {f"rank {rank} in arm {arm}" for arm in RUN}
        env = arms.env()


def test_ranges_and_kernels_are_the_arms(arms: Launch) -> None:
    ranges = arms.effects(arm="big")["NSA_SEL_RANGES_V2"]
    assert ranges["took_effect"] is True
    assert ranges["evidence"]["ranges"] == ["nsa.sel.ranges_v1"]
    assert ranges["evidence"]["ran"] == ["v1"]
    flash = arms.effects(arm="flash")["NSA_SDPA_FLASH_ONLY"]
    assert flash["took_effect"] is True
    assert flash["evidence"]["kernels"]["sel"] == "flash"
    without = arms.effects(arm="noflash")["NSA_SDPA_NO_FLASH"]
    assert without["took_effect"] is True
    assert "flash" not in without["evidence"]["kernels"]["sel"]


def test_origin_accumulation_communicates_once_per_step(arms: Launch) -> None:
    """Bytes on the wire: one gradient per optimizer step, though there are two micro-batches."""
    assert "[ddp] gradient compression enabled: bf16" in arms.text()
    effect = arms.effects(arm="bf16")["NSA_DDP_COMPRESS"]["evidence"]
    gradient_bytes = arms.env()["effective"]["n_params"] * 4
    # The origin's gradients were bf16 already.
    assert (effect["gradient_dtype"], effect["wire_dtype"]) == ("float32", "bfloat16")
    assert effect["bytes_before"] == gradient_bytes * effect["steps"]
    assert effect["bytes_after"] * 2 == effect["bytes_before"]
    assert arms.effects(arm="small")["NSA_DDP_COMPRESS"]["evidence"] == {"hook": None}
