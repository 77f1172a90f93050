"""Every file of a run directory, from one launch with nearly everything switched on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nsa.toggles import TOGGLES
from nsa.train import restore
from runbook.tools.inspect import RemarkCode
from runbook.tools.inspect.folder import inspect_path
from tests.train.conftest import STEPS
from tests.train.launching import Launch

pytestmark = pytest.mark.e2e


def test_everything_that_it_tells_balances(everything: Launch) -> None:
    """By the accounts of the harness, which have no line in common with the trainer.

    Rows, rates, tokens, times beside steps, the schedule, losses of both ranks, buckets, settings
    in force, evaluations, gates, checkpoints.
    """
    assert everything.process.returncode == 0, everything.text()
    (told,) = inspect_path(everything.run_dir).remarks
    assert told.code is RemarkCode.WINDOW_TOO_SHORT, told.message


def test_origin_the_csv_has_a_header_and_one_row_per_step(everything: Launch) -> None:
    """The origin wrote no header, one row per 20 steps, and appended to earlier runs."""
    text = (everything.run_dir / "training.csv").read_text()
    assert text.startswith(
        "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s\n"
    )
    assert text.endswith("\n")
    assert [int(step) for step in everything.column("step")] == list(range(1, STEPS + 1))


def test_origin_heartbeats_of_every_rank_can_be_read(everything: Launch) -> None:
    """The origin's watchdog could not read a heartbeat, and rank 1 wrote none."""
    for rank in range(2):
        beats = everything.beats(rank)
        assert beats[0]["event"] == "boot" and beats[-1]["event"] == "exit"
        for event in ("step_start", "fetched", "step_end"):
            steps = [b["step"] for b in beats if b["event"] == event]
            assert steps == list(range(1, STEPS + 1))
        progress = [b["step"] for b in beats if b["event"] == "progress"]
        assert progress == list(range(2, STEPS + 1, 2))  # NSA_HEARTBEAT_EVERY=2
        assert {b["rank"] for b in beats} == {rank}
        assert len({(b["pid"], b["token"]) for b in beats}) == 1
        assert all(b["rss_mib"] > 50 and b["cuda_mib"] is None for b in beats)
        monotonic = [b["mono"] for b in beats]
        assert all(a <= b for a, b in pairwise(monotonic))
        phases = {b["phase"] for b in beats}
        all_ranks = {"init", "first_step", "data", "step", "eval", "checkpoint", "exit"}
        assert phases == (all_ranks if rank else all_ranks | {"profile"})


def _model(launch: Launch) -> dict[str, torch.Tensor]:
    saved = restore.read(launch.run_dir / "checkpoints" / "step_12")
    return {name: tensor for name, tensor in saved.items() if name.startswith("model.")}


def test_env_tells_what_really_ran(everything: Launch) -> None:
    env = everything.env()
    effective = env["effective"]
    assert env["schema_version"] == 1 and (env["world_size"], env["nodes"]) == (2, 1)
    assert effective["seq_len"] == 128
    assert (effective["global_batch"], effective["per_rank_batch"]) == (2, 1)
    assert (effective["accumulation"], effective["tokens_per_step"]) == (2, 512)
    assert (effective["dtype"], effective["master_dtype"]) == ("bf16", "fp32")
    assert (effective["device"], effective["dataset"]) == ("cpu", "markov")
    assert effective["attention_path"] == "batched"
    assert effective["loss_floor"] == pytest.approx(1.10974, abs=1e-4)
    assert effective["n_params"] == sum(t.numel() for t in _model(everything).values())
    assert env["config"]["train"]["lr"] == 1e-3
    assert env["config_sources"]["train.lr"] == "NSA_LR"
    assert env["versions"]["torch"] == torch.__version__
    assert env["git"]["sha"] is None or len(env["git"]["sha"]) == 40
    assert len(env["config_sha256"]) == 64
    assert env["arms"] is None
    attention = env["attention"]
    assert attention["window"]["value"] == "masked" and attention["selected"]["value"] == "sdpa"
    assert attention["window"]["reason"] == "Triton kernels are switched off"
    assert attention["self_test"]["paths"]["cpu_masked"]["agrees"]
    assert "[self-test] cpu_masked: agrees" in everything.text()
    assert env["policies"]["sdpa_kernels"]["flash"] is True


def test_passed_variables_are_recorded_and_mapped(everything: Launch) -> None:
    passed = {row["name"]: row for row in everything.env()["passthrough"]}
    assert passed["NCCL_ALGO"]["mapped_to"] == "NCCL_ALGO=Ring"
    alloc = passed["PYTORCH_CUDA_ALLOC_CONF"]
    assert alloc["mapped_to"] == "PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_the_trace_holds_the_range_that_nvtx_promises(everything: Launch) -> None:
    with gzip.open(everything.run_dir / "trace_rank0.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "nsa.sel.ranges_v2" in names
    effects = [b for b in everything.beats(0, "effect") if b["toggle"] == "NSA_NVTX"]
    assert [b["took_effect"] for b in effects] == [True]


# A large block is freed, which raises malloc's threshold; then 16 of 4 MiB, each with one that
# stays behind it, so that nothing of them is at the end of the heap when they are freed. It is too
# large for the holes that a module leaves which Python has just compiled.
_FREED = """
import ctypes, sys
from nsa.launch.output import ResidentMemory, keep_no_large_block
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if sys.argv[1] == "kept small":
    keep_no_large_block()
libc.free(libc.malloc(8 << 20))
memory = ResidentMemory()
before, held = memory.mib(), []
for _ in range(16):
    held.append(libc.malloc(4 << 20))
    libc.memset(held[-1], 1, 4 << 20)
    libc.memset(libc.malloc(256 << 10), 1, 4096)
for block in held:
    libc.free(block)
print(memory.mib() - before)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("kept small", -1, 8), ("as it is", 48, 80)])
def test_malloc_keeps_nothing_large_that_is_free(how: str, least: float, most: float) -> None:
    """What it keeps looks like a leak: 64 MiB here, of which a rank that trains must keep none."""
    argv = [sys.executable, "-c", _FREED, how]
    told = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    assert least <= float(told) <= most


def test_memory_snapshots(everything: Launch) -> None:
    names = {path.name for path in everything.run_dir.glob("mem_*.json")}
    assert names == {
        f"mem_{when}_step{step}_rank{rank}.json"
        for when in ("pre", "post")
        for step in (10, 20)
        for rank in range(2)
    }
    facts = json.loads((everything.run_dir / "mem_post_step10_rank1.json").read_text())
    assert facts["rss_mib"] > 50


def test_tensorboard_events_or_a_line_that_says_why_not(everything: Launch) -> None:
    written = list(Path(everything.run_dir / "tb").glob("events.*"))
    assert written or "[tensorboard] not available" in everything.text()
    assert everything.effects()["NSA_TB_DISABLE"]["took_effect"] is bool(written)


def test_what_is_not_available_is_said(everything: Launch) -> None:
    effect = everything.effects()["NSA_USE_FA2"]
    assert effect["took_effect"] is False
    assert "not available" in effect["evidence"]
    assert "NSA_USE_FA2=True: had NO effect" in everything.text()


@pytest.mark.slow
def test_every_toggle_says_whether_it_took_effect(
    everything: Launch, arms: Launch, singles: dict[str, Launch]
) -> None:
    """Across three launches every toggle of the table is set, and every one has its event."""
    told: dict[str, bool | None] = {}
    launches = [everything, arms, singles["others"]]
    for launch in launches:
        for beat in launch.beats(0, "effect"):
            told[beat["toggle"]] = told.get(beat["toggle"]) or beat["took_effect"]
    # Those of the watchdog and the tests all take the same way.
    named = {n for n, t in TOGGLES.items() if t.reader == "trainer"} - {"NSA_USE_FA2"}
    assert {n for n in named if not told.get(n)} == set()
    assert told["NSA_WATCH_HALT"] is None
    for launch in launches:
        listed = {row["name"] for row in launch.env()["toggles"]}
        assert listed <= {beat["toggle"] for beat in launch.beats(0, "effect")}
