"""What a checkpoint holds, going on from the newest sound one, and reading saves back.

Loading one runs no code that it may hold. Is what lies on the disk what the run held when the save
began, and which steps lie there? Some elements of every tensor are noted as a save begins. When the
next one begins, and when the launch is over, rank 0 reads its newest checkpoint back and compares,
bit by bit.
"""

from __future__ import annotations

import json
import pickle
import random
import warnings
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
    checkpoint_name,
    checkpoint_step,
)
from nsa.contract.digests import damage, identity_of
from nsa.step.engine import Engine

# torch says so whenever one process saves or loads by itself.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

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
# Of a tensor.
_ELEMENTS = 64
# So many elements of a checkpoint are read back.
_MOST_READ = 1 << 29
# Steps and tensors that are named; more of them say no more.
_MOST_WRONG = 8


def shared_state(engine: Engine) -> dict[str, Tensor]:
    """What all ranks hold alike, live: the tensors of model (a tied one once) and optimizer."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in engine.model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[f"model.{name}"] = tensor.detach()
    for name, parameter in engine.model.named_parameters():
        for key, value in engine.optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = value.detach()
    return found


def rank_state(engine: Engine, position: dict[str, Any] | None) -> dict[str, Tensor]:
    """What is this rank's own: random states, and its place in the data where there is one."""
    states = {"rng": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states["cuda_rng"] = torch.cuda.get_rng_state(engine.device)
    if position is not None:
        text = json.dumps(position).encode()
        states["position"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return {f"rank{engine.ranks.rank}.{name}": value for name, value in states.items()}


def position_name(rank: int) -> str:
    """How a rank's place in the data is named in a checkpoint."""
    return f"rank{rank}.position"


def read_position(saved: Tensor) -> dict[str, Any]:
    """A position in the data as `rank_state` keeps it."""
    position: dict[str, Any] = json.loads(saved.numpy().tobytes())
    return position


def numbered(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step; what is being written or removed is none."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = {checkpoint_step(folder.name): folder for folder in folders}
    return {step: folder for step, folder in found.items() if step is not None}


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


# -- going on --------------------------------------------------------------------------------------


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


# -- reading back ----------------------------------------------------------------------------------


class ReadBack:
    """Notes what a save has to hold; `compare` reads it back, `report` says what came of all."""

    def __init__(self, engine: Engine, *, token: str) -> None:
        self._engine = engine
        self._random = random.Random(f"read back {token}")  # noqa: S311 - which elements
        self._step: int | None = None
        self._places: dict[str, Tensor] = {}
        self._noted: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._read, self._wrong = 0, list[int]()
        self._unreadable: str | None = None

    def note(self, step: int) -> None:
        """A save of this step begins: copy the elements. Waits for nothing."""
        if self._engine.ranks.rank != 0:
            return
        live = shared_state(self._engine)
        self._sizes = {name: tensor.numel() for name, tensor in live.items()}
        self._draw(live)
        self._step = step
        # The optimizer's counts change their device with its kernels.
        self._noted = {
            name: tensor.reshape(-1).index_select(0, self._places[name].to(tensor.device))
            for name, tensor in live.items()
        }

    def compare(self, folder: Path) -> tuple[int, dict[str, int]]:
        """How many elements of the newest checkpoint, which is written, were compared, and how many
        are not what was noted, of each tensor of which any is.

        All of one that cannot be read: it is no reason to end a run that has the weights.
        """
        if self._step is None:
            return 0, {}
        self._read += 1
        names = self._every()
        saved = self._saved(folder / checkpoint_name(self._step), names)
        counts = {name: self._differ(saved.get(name), name) for name in names}
        differ = {name: count for name, count in counts.items() if count}
        if differ and len(self._wrong) < _MOST_WRONG:
            self._wrong.append(self._step)
        return sum(len(self._places[name]) for name in names), differ

    def _differ(self, saved: Tensor | None, name: str) -> int:
        places = self._places[name]
        if saved is None:
            return len(places)
        found = saved.reshape(-1).index_select(0, places.cpu())
        return int((found != self._noted[name].cpu()).sum())

    def report(self, folder: Path) -> dict[str, Any] | None:
        """`step`, `elements` compared, how many are `other` ones, in which `tensors`, and `kept`.

        Of the newest one, all tensors; `read` counts all that were read back, `wrong` are the steps
        of those that were not right; `unreadable` is why the first one of those could not be read.
        folder: of the checkpoints, all of which are written; `kept` are the steps that lie there;
        `positions` is where each rank goes on in its data. None on other ranks, and where none was
        saved.
        """
        if self._step is None:
            return None
        elements, differ = self.compare(folder)
        return {
            "step": self._step,
            "tensors": sorted(differ)[:_MOST_WRONG],
            "elements": elements,
            "other": sum(differ.values()),
            "read": self._read,
            "wrong": self._wrong,
            "unreadable": self._unreadable,
            "kept": sorted(numbered(folder)),
            "positions": self._positions(folder / checkpoint_name(self._step)),
        }

    def _positions(self, newest: Path) -> list[Any] | None:
        """Where each rank goes on in its data, by rank; None where one cannot be read."""
        names = [position_name(rank) for rank in range(self._engine.ranks.world_size)]
        saved = self._saved(newest, names)
        known = all(name in saved for name in names)
        return [read_position(saved[name]) for name in names] if known else None

    def _saved(self, folder: Path, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors; none of a checkpoint that cannot be read, and the first reason is kept."""
        try:
            return read(folder, names=names)
        except (CheckpointError, OSError) as error:
            self._unreadable = self._unreadable or str(error)
            return {}

    def _draw(self, live: dict[str, Tensor]) -> None:
        """Places in every tensor that has none yet: moments come with the first update."""
        for name, tensor in live.items():
            if name not in self._places:
                count = tensor.numel()
                places = self._random.sample(range(count), min(_ELEMENTS, count))
                self._places[name] = torch.tensor(sorted(places), device=tensor.device)

    def _every(self) -> list[str]:
        """All tensors, or as many drawn ones as may be read."""
        found, left = list[str](), _MOST_READ
        for name in self._random.sample(list(self._sizes), len(self._sizes)):
            if self._sizes[name] <= left:
                found.append(name)
                left -= self._sizes[name]
        return found
