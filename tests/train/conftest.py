"""Real launches, each shared by many tests, on whichever worker they run."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest

from nsa.contract import shard_file
from tests.shared import once
from tests.train.launching import SMOKE, Launch, run, schedule, start

# Every launch of `everything` and of its continuation runs under these.
EVERYTHING = {
    "NSA_SELF_TEST": "on",
    "NSA_DDP_COMPRESS": "bf16",
    "NSA_DDP_BUCKET_MB": "0.25",
    "NSA_DDP_STATIC_GRAPH": "1",
    "NSA_OPT_FUSED": "1",
    "NSA_NVTX": "1",
    "NSA_SDPA_AUDIT": "1",
    "NSA_MEM_DUMP_EVERY": "10",
    "NSA_HEARTBEAT_EVERY": "2",
    "NSA_TB_DISABLE": "0",
    "NSA_USE_FA2": "1",
    "NSA_PG_TIMEOUT_MIN": "5",
    "NSA_ACCUM": "2",
    "NSA_LR": "1e-3",
    "NSA_WATCH_INTERVAL_S": "10",
    "NSA_TEST_SEL_PACK": "1",
    "NCCL_ALGO": "Ring",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
STEPS = 24


def edited(folder: Path, *changes: tuple[str, str]) -> Path:
    """The smoke config with some text replaced."""
    text = SMOKE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Two ranks, nearly every toggle, evaluation, checkpoints, profiler, audit, bf16."""
    return once(tmp_path_factory, "everything", _everything)


def _everything(folder: Path) -> Launch:
    return _with_everything(folder, "--profile-steps", "3")


def _with_everything(folder: Path, *more: str) -> Launch:
    config = edited(folder, ("eval_every: 0", "eval_every: 8"), ("save_every: 0", "save_every: 12"))
    args = ["--dataset", "markov", "--ddp", "1", "--steps", str(STEPS), "--precision", "bf16"]
    return run(folder, [*args, *more], ranks=2, toggles=EVERYTHING, config=config)


@pytest.fixture(scope="session")
def resumed(everything: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """`everything` again from its checkpoints, the newest of which has one flipped bit."""
    return once(tmp_path_factory, "resumed", lambda folder: _resumed(everything, folder))


def _resumed(everything: Launch, folder: Path) -> Launch:
    copy = folder / "checkpoints"
    shutil.copytree(everything.run_dir / "checkpoints", copy)
    share = copy / f"step_{STEPS}" / shard_file(0)
    data = bytearray(share.read_bytes())
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    return _with_everything(folder, "--resume", str(copy))


@pytest.fixture(scope="session")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Launch]:
    """The same four sequences in one step: by one rank at once, by two ranks in two halves."""
    return once(tmp_path_factory, "one_step", _one_step)


def _one_step(folder: Path) -> dict[int, Launch]:
    args = ["--dataset", "synthetic", "--steps", "1", "--save"]
    return {
        1: run(folder / "1", [*args, "--ddp", "0", "--batch-size", "4"]),
        2: run(folder / "2", [*args, "--ddp", "1", "--batch-size", "2", "--accum", "2"], ranks=2),
    }


@pytest.fixture(scope="session")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Arms inside one launch on two ranks: one cannot run, and `.ENOUGH` stops before the last."""
    return once(tmp_path_factory, "arms", _arms)


def _arms(folder: Path) -> Launch:
    blocks = schedule(
        ("small", 5, {"NSA_DDP_BUCKET_MB": "0.25", "NSA_OPT_FUSED": "0"}),
        ("big", 5, {"NSA_DDP_BUCKET_MB": "1", "NSA_OPT_FUSED": "1", "NSA_SEL_RANGES_V2": "0"}),
        ("triton", 5, {"NSA_USE_TRITON_SEL": "1"}),
        ("flash", 5, {"NSA_SDPA_FLASH_ONLY": "1", "NSA_SDPA_AUDIT": "1"}),
        ("noflash", 5, {"NSA_SDPA_NO_FLASH": "1"}),
        ("bf16", 20, {"NSA_DDP_COMPRESS": "bf16", "NSA_DDP_FIND_UNUSED": "1"}),
        ("never", 5000, {}),
    )
    path = folder / "arms.json"
    path.write_text(blocks)
    args = ["--dataset", "synthetic", "--ddp", "1", "--accum", "2", "--arms", str(path)]
    launch = start(folder, args, ranks=2)
    launch.until(lambda it: any(b["arm"] == "bf16" for b in it.beats(0, "effect")))
    (launch.run_dir / ".ENOUGH").touch()
    return launch.wait()


@pytest.fixture(scope="session")
def singles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    """Short launches of one process each, side by side."""
    return once(tmp_path_factory, "singles", _singles)


def _singles(folder: Path) -> dict[str, Launch]:
    docs = folder / "docs.jsonl"
    docs.write_text("".join(json.dumps({"text": f"Document {i}. " * 9}) + "\n" for i in range(40)))
    synthetic = ["--dataset", "synthetic", "--steps", "20"]
    others = {
        "NSA_PREFILL_BATCHED": "0",
        "NSA_SEQ_LEN": "24",
        "NSA_BATCH_SIZE": "2",
        "NSA_SEL_RANGES_V2": "0",
        "NSA_DISABLE_CSV_LOGS": "1",
        "NSA_DISABLE_AUX_STATS": "1",
        "NSA_DDP_DISABLE_GC": "0",
        "NSA_DDP_SAFE_MODE": "1",
        "NSA_DDP_FIND_UNUSED": "0",
        "NSA_SCALER_INIT_SCALE": "1024",
        "NSA_SCALER_GROWTH_INTERVAL": "7",
        "NSA_SCALER_GROWTH_FACTOR": "3",
        "NSA_SCALER_BACKOFF_FACTOR": "0.25",
        "NSA_WATCH_HALT": "0",
        "NSA_USE_TRITON_SEL": "0",
    }
    local = ["--dataset", "local", "--local-path", str(docs), "--steps", "4"]
    fineweb = ["--dataset", "fineweb_edu", "--steps", "3", "--seq-len", "32"]
    # No network and no cache: the stream cannot be reached, whatever is installed.
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    launches = {
        "others": start(
            folder / "others", [*local, "--steps", "2", "--precision", "fp16"], toggles=others
        ),
        "fallback": start(
            folder / "fallback",
            [*fineweb, "--synthetic-on-fail", "--out-dir", str(folder / "out")],
            harness=False,
            toggles=offline,
        ),
        "offline": start(folder / "offline", fineweb, toggles=offline),
        "disk": start(folder / "disk", synthetic, before=small_files),
    }
    return {name: launch.wait() for name, launch in launches.items()}
