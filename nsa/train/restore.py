"""Going on from the newest sound checkpoint; loading one runs no code that it may hold."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from nsa.contract import (
    CHECKPOINTS_DIR,
    CHECKSUMS_JSON,
    ENV_JSON,
    METADATA_FILE,
    CheckpointError,
    checkpoint_step,
)
from nsa.contract.digests import damage, identity_of
from nsa.step.engine import Engine
from nsa.train.checkpoint import numbered, position_name, shared_state

# All that the list of tensors of a checkpoint may name; torch itself would run whatever it names.
_HARMLESS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
# A run goes on from a run that went on from a run ...
_MOST_RUNS = 1000


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that was loaded, and the ones that were refused before it.

    evaluated: whether the run that wrote it had evaluated that very step.
    """

    path: Path
    step: int
    sha256: str
    position: dict[str, Any]
    refused: tuple[str, ...]
    evaluated: bool

    def owes_evaluation(self, every: int) -> bool:
        """Was an evaluation due at its step, every so many, that the end of that run left out?"""
        return every > 0 and self.step % every == 0 and not self.evaluated


def find_step(path: Path, rank: int) -> tuple[Path, list[str]]:
    """The newest sound checkpoint at `path` (a run directory, its checkpoints, or one of them).

    A damaged one is refused and the one before it is tried; a run that ended before its first
    one is followed to the run that it went on from. Returns it and the refusals. Raises
    CheckpointError when none is left.
    """
    refused: list[str] = []
    place: Path | None = path
    for _ in range(_MOST_RUNS):
        if place is None:
            break
        for folder in _candidates(place):
            wrong = damage(folder, rank)
            if wrong is None:
                return folder, refused
            refused.append(f"{folder}: {wrong}")
        place = _before(place)
    if not refused:
        raise CheckpointError(f"--resume {path}: no checkpoint (step_N) there")
    lines = "".join(f"\n  - {line}" for line in refused)
    raise CheckpointError(f"--resume {path}: no sound checkpoint{lines}")


def load(path: Path, engine: Engine) -> Restored:
    """Restore model, optimizer, scaler and random states. A collective: ranks must agree."""
    rank = engine.ranks.rank
    folder, refused = find_step(path, rank)
    if not engine.ranks.same_everywhere(str(folder.resolve())):
        raise CheckpointError(f"--resume {path}: the ranks found different sound checkpoints")
    facts = json.loads((folder / CHECKSUMS_JSON).read_bytes())
    if facts["world_size"] != engine.ranks.world_size:
        raise CheckpointError(
            f"--resume {folder}: written by {facts['world_size']} ranks, this launch has "
            f"{engine.ranks.world_size}; the data position cannot be split anew"
        )
    saved = read(folder)
    _put_back(engine, saved, folder)
    engine.scaler.load_state_dict(facts["scaler"])
    torch.set_rng_state(saved[f"rank{rank}.rng"])
    cuda_rng = saved.get(f"rank{rank}.cuda_rng")
    if engine.device.type == "cuda" and cuda_rng is not None:
        torch.cuda.set_rng_state(cuda_rng, engine.device)
    position = read_position(saved[position_name(rank)])
    return Restored(
        path=folder,
        step=int(facts["step"]),
        sha256=identity_of(folder),
        position=position,
        refused=tuple(refused),
        evaluated=facts.get("val_loss") is not None,
    )


def read_position(saved: Tensor) -> dict[str, Any]:
    """A position in the data as `rank_state` keeps it."""
    position: dict[str, Any] = json.loads(saved.numpy().tobytes())
    return position


def read(folder: Path, *, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint by name, on the host: all, or those. Raises CheckpointError."""
    reader = _Reader(folder)
    try:
        metadata = reader.read_metadata()
        _held_in_full(folder, metadata)
        listed = metadata.state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
            for name, entry in listed.items()
            if names is None or name in names
        }
        load_tensors(tensors, storage_reader=reader, no_dist=True)
    except (CheckpointException, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder}: cannot be read as a checkpoint: {error}") from error
    return tensors


def _held_in_full(folder: Path, metadata: Metadata) -> None:
    """Raise CheckpointError where a file ends before any tensor in it does, asked for or not."""
    for index, place in metadata.storage_data.items():
        file = folder / place.relative_path
        size = file.stat().st_size if file.exists() else 0
        if size < place.offset + place.length:
            raise CheckpointError(
                f"{folder}: {file.name} has {size} bytes, {index.fqn} is at {place.offset} to "
                f"{place.offset + place.length}"
            )


class _Reader(FileSystemReader):
    """Reads the list of tensors without running what it might name."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The list of tensors and where they are."""
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _HARMLESS.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA_FILE} names {module}.{name}")


def _put_back(engine: Engine, saved: dict[str, Tensor], folder: Path) -> None:
    """Model and optimizer; refused where the checkpoint is of another shape of model."""
    names = {id(p): name for name, p in engine.model.named_parameters()}
    state = engine.optimizer.state_dict()
    order = [p for group in engine.optimizer.param_groups for p in group["params"]]
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in saved.items():
        owner, _, rest = key.partition(".")
        if owner == "optimizer":
            name, _, part = rest.rpartition(".")
            moments.setdefault(name, {})[part] = value
    wanted, stored = _model(shared_state(engine)), _model(saved)
    shapes, found = ({key: v.shape for key, v in part.items()} for part in (wanted, stored))
    other = sorted(key for key in shapes | found if shapes.get(key) != found.get(key))
    if other or set(moments) != set(names.values()):
        raise CheckpointError(
            f"--resume {folder}: is of another model: {', '.join(other[:3]) or 'the optimizer'} "
            "differs; use the config that it was written with"
        )
    for key, tensor in wanted.items():
        tensor.copy_(stored[key])
    # The rate and the kernels are this launch's; load_state_dict puts each step count where the
    # kernels want it.
    state["state"] = {number: moments[names[id(p)]] for number, p in enumerate(order)}
    engine.optimizer.load_state_dict(state)


def _model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def _candidates(path: Path) -> list[Path]:
    limit = checkpoint_step(path.name)
    found = numbered(_checkpoints(path))
    return [found[step] for step in sorted(found, reverse=True) if limit is None or step <= limit]


def _checkpoints(path: Path) -> Path:
    if checkpoint_step(path.name) is not None:
        return path.parent
    return path if path.name == CHECKPOINTS_DIR else path / CHECKPOINTS_DIR


def _before(path: Path) -> Path | None:
    """The checkpoint that the run there went on from, as its env.json says."""
    try:
        env = json.loads((_checkpoints(path).parent / ENV_JSON).read_bytes())
        return Path(env["resumed"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
