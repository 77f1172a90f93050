"""Checkpoints that survive: whole or absent, with digests, loaded without running code.

`checkpoints/step_N/` holds model.pt, optimizer.pt, one rank{r}.pt per rank (random states and the
data position) and checksums.json. All is written under a temporary name, put on the disk, and
renamed when every rank has succeeded. Earlier checkpoints stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.contract import (
    CHECKPOINTS_DIR,
    CHECKSUMS_JSON,
    MODEL_FILE,
    NSAError,
    checkpoint_name,
    checkpoint_step,
)
from nsa.train.engine import Engine
from nsa.train.output import RecordWriteError, sync_folder, write_json


class CheckpointError(NSAError):
    """No usable checkpoint; the message says what is wrong with each candidate."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that was loaded, and the ones that were refused before it."""

    path: Path
    step: int
    position: dict[str, Any]
    refused: tuple[str, ...]


def save(run_dir: Path, engine: Engine, *, step: int, position: dict[str, Any]) -> Path:
    """Write `checkpoints/step_N` on all ranks together. A collective.

    Raises RecordWriteError on a rank that could not write, RuntimeError on the others; then
    nothing has the final name.
    """
    ranks = engine.ranks
    final = run_dir / CHECKPOINTS_DIR / checkpoint_name(step)
    temporary = final.with_name(f".{final.name}.tmp")
    problem: OSError | None = None
    try:
        temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ranks.rank == 0:
            _write(temporary / MODEL_FILE, engine.model.state_dict())
            _write(temporary / "optimizer.pt", _optimizer_state(engine))
        _write(temporary / f"rank{ranks.rank}.pt", _rank_state(engine, step, position))
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as RuntimeError.
        problem = error if isinstance(error, OSError) else OSError(0, str(error))
    if ranks.any(problem is not None):
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if problem is not None:
            raise RecordWriteError(temporary, problem) from problem
        raise RuntimeError(f"checkpoint {final}: another rank could not write its part")
    if ranks.rank == 0:
        sums = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
        write_json(temporary / CHECKSUMS_JSON, {"step": step, "sha256": sums})
        temporary.rename(final)
        sync_folder(final.parent)
    if ranks.world_size > 1:
        dist.barrier()
    return final


def find_step(path: Path, rank: int) -> tuple[Path, list[str]]:
    """The newest sound checkpoint at `path` (a run directory, its checkpoints, or one of them).

    A damaged one is refused and the one before it is tried. Returns it and the refusals. Raises
    CheckpointError when none is left.
    """
    candidates = _candidates(path)
    if not candidates:
        raise CheckpointError(f"--resume {path}: no checkpoint (step_N) there")
    refused: list[str] = []
    for folder in candidates:
        wrong = damage(folder, rank)
        if wrong is None:
            return folder, refused
        refused.append(f"{folder}: {wrong}")
    lines = "".join(f"\n  - {line}" for line in refused)
    raise CheckpointError(f"--resume {path}: no sound checkpoint{lines}")


def damage(folder: Path, rank: int) -> str | None:
    """What is wrong with a checkpoint, by its digests; None when it is sound."""
    try:
        listed: dict[str, str] = json.loads((folder / CHECKSUMS_JSON).read_bytes())["sha256"]
        needed = {MODEL_FILE, "optimizer.pt", f"rank{rank}.pt"}
        if not needed <= set(listed):
            return f"holds no {', '.join(sorted(needed - set(listed)))}"
        for name, digest in listed.items():
            if _sha256(folder / name) != digest:
                return f"{name} differs from its sha256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable ({type(error).__name__}: {error})"
    return None


def load(path: Path, engine: Engine) -> Restored:
    """Restore model, optimizer, scaler and random states. A collective: ranks must agree."""
    rank = engine.ranks.rank
    folder, refused = find_step(path, rank)
    if not engine.ranks.same_everywhere(str(folder.resolve())):
        raise CheckpointError(f"--resume {path}: the ranks found different sound checkpoints")
    engine.model.load_state_dict(_read(folder / MODEL_FILE))
    state = _read(folder / "optimizer.pt")
    fused = engine.is_fused()
    for group in state["optimizer"]["param_groups"]:
        group["fused"] = fused or None
    engine.optimizer.load_state_dict(state["optimizer"])
    engine.scaler.load_state_dict(state["scaler"])
    mine = _read(folder / f"rank{rank}.pt")
    if mine["world_size"] != engine.ranks.world_size:
        raise CheckpointError(
            f"--resume {folder}: written by {mine['world_size']} ranks, this launch has "
            f"{engine.ranks.world_size}; the data position cannot be split anew"
        )
    torch.set_rng_state(mine["rng"])
    if engine.device.type == "cuda" and mine["cuda_rng"] is not None:
        torch.cuda.set_rng_state(mine["cuda_rng"], engine.device)
    position = json.loads(mine["position"])
    return Restored(path=folder, step=int(mine["step"]), position=position, refused=tuple(refused))


def _candidates(path: Path) -> list[Path]:
    limit = checkpoint_step(path.name)
    if limit is not None:
        parent = path.parent
    else:
        parent = path if path.name == CHECKPOINTS_DIR else path / CHECKPOINTS_DIR
    numbered = []
    for folder in parent.iterdir() if parent.is_dir() else ():
        step = checkpoint_step(folder.name)
        if step is not None and (limit is None or step <= limit):
            numbered.append((step, folder))
    return [folder for _, folder in sorted(numbered, reverse=True)]


def _optimizer_state(engine: Engine) -> dict[str, Any]:
    return {"optimizer": engine.optimizer.state_dict(), "scaler": engine.scaler.state_dict()}


def _rank_state(engine: Engine, step: int, position: dict[str, Any]) -> dict[str, Any]:
    cuda = engine.device.type == "cuda"
    return {
        "step": step,
        "world_size": engine.ranks.world_size,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(engine.device) if cuda else None,
        "position": json.dumps(position),
    }


def _write(path: Path, state: Any) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
