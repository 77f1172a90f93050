"""Arms inside one launch: each takes effect, a failing one is skipped by all; compiled ones."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from nsa.launch.asked import Block
from nsa.toggles import parse_toggles
from nsa.witness.effect_watch import BlockEvidence
from tests.shared import once
from tests.train.launching import Launch, run, schedule, start

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


TIMEOUT_S = 420
LAYER = {"NSA_COMPILE": "layer"}


@pytest.fixture(scope="session")
def arms_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Two ranks, bf16 on the wire and in the step, accumulation, a static graph: arm after arm."""
    return once(tmp_path_factory, "arms_of_kernels", _arms_of_kernels)


def _arms_of_kernels(folder: Path) -> Launch:
    arms = schedule(
        ("off", 4, {"NSA_COMPILE": "off"}),
        ("layer", 4, LAYER),
        ("graphs", 4, {"NSA_CUDA_GRAPHS": "1"}),
        ("again", 4, LAYER | {"NSA_DDP_STATIC_GRAPH": "0", "NSA_DDP_FIND_UNUSED": "1"}),
    )
    args = ["--dataset", "markov", "--ddp", "1", "--accum", "2", "--precision", "bf16"]
    toggles = {
        "NSA_DDP_COMPRESS": "bf16",
        "NSA_DDP_STATIC_GRAPH": "1",
        "NSA_DDP_BUCKET_MB": "0.25",
    }
    words = [*args, "--arms", arms]
    return start(folder, words, ranks=2, toggles=toggles).wait(TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_arms_that_can_run_do_on_every_rank_and_the_others_say_why(arms_of_kernels: Launch) -> None:
    launch = arms_of_kernels
    assert launch.exit(0)["code"] == launch.exit(1)["code"] == 0, launch.text()
    assert launch.exit(0)["param_hash"] == launch.exit(1)["param_hash"]
    refused = {beat["arm"]: beat["error"] for beat in launch.beats(1, "arm_failed")}
    assert refused == {
        "graphs": "NSA_CUDA_GRAPHS=1: CUDA graphs need a CUDA device, this is cpu; set it to 0",
    }
    calls = {"off": 0, "layer": 3, "again": 3}
    assert Counter(row["arm"] for row in launch.rows()) == dict.fromkeys(calls, 7)
    for rank, (arm, count) in product((0, 1), calls.items()):
        effects = launch.effects(rank, arm)
        assert effects["NSA_COMPILE"]["evidence"]["compiled_calls"] == count
        for name in ("NSA_COMPILE", "NSA_DDP_BUCKET_MB", "NSA_DDP_COMPRESS"):
            assert effects[name]["took_effect"] is True
    # What was compiled stays so, and nothing is compiled in a step.
    told = [(it["where"], it["added"], it["timed"]) for it in launch.beats(0, "compiled")]
    assert told == [("block", 2, False)]


def test_a_graph_in_a_timed_step_takes_the_effect_back() -> None:
    """`toggles_effective` and every comparison of arms are INVALID by such a report."""
    told: list[tuple[Any, ...]] = []
    engine = type("E", (), {"ranks": type("R", (), {"rank": 1}), "device": None})
    log = type("L", (), {"effect": staticmethod(lambda *words: told.append(words[1:]))})
    for variables in ({"NSA_COMPILE": "layer"}, {}):
        block = Block(index=0, arm="", warmup_steps=0, steps=5, toggles=parse_toggles(variables))
        evidence = BlockEvidence(
            block, log=cast("Any", log), engine=cast("Any", engine), profiler=None, running={}
        )
        evidence.judge_steps(0)
        evidence.judge_steps(2)
    why = {"compiled_in_timed_steps": 2}
    assert told == [("NSA_COMPILE", False, why)]


def test_a_plain_launch_that_cannot_have_it_does_not_start(tmp_path: Path) -> None:
    launch = run(
        tmp_path,
        ["--dataset", "markov", "--ddp", "0"],
        toggles={**LAYER, "NSA_PREFILL_BATCHED": "0"},
    )
    assert launch.process.returncode == 2
    assert "token by token, a graph would hold every token" in launch.text()
    assert not (launch.run_dir / "training.csv").exists()
