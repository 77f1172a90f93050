"""Checkpoints that are written while training goes on: whole or absent, with digests.

`checkpoints/step_N/` is a checkpoint of torch.distributed.checkpoint, and its tools read it:
tensors only, each rank's share in a file of its own. A save holds training up for as long as
copying the tensors to the host takes; a thread writes the copy under a temporary name. Once every
rank has put its share on the disk, rank 0 adds digests and gives it its name.
"""

from __future__ import annotations

import copyreg
import json
import math
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from nsa.contract import CHECKSUMS_JSON, checkpoint_name, checkpoint_step
from nsa.contract.digests import sha256_of
from nsa.launch.output import RecordWriteError, sync_folder, write_json
from nsa.settings import TrainSection
from nsa.step.engine import Engine

# Python 3.11.2 (Debian 12) keeps a member of an enumeration as a call of `getattr`, which a reader
# that runs nothing refuses. By its value is how later ones keep it.
copyreg.pickle(_MEM_FORMAT_ENCODING, lambda member: (_MEM_FORMAT_ENCODING, (member.value,)))
# torch says so whenever one process saves or loads by itself.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A save that was started. `held_up_s`: how long training stood still for it."""

    final: Path
    temporary: Path
    future: Future[Any]
    begin: float
    held_up_s: float

    def wait(self, rank: int) -> None:
        """Until it has its final name.

        Raises RecordWriteError on a rank that could not write, RuntimeError on the others; then
        nothing has the final name.
        """
        try:
            self.future.result()
        except CheckpointException as error:
            if rank == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            mine = error.failures.get(rank)
            if mine is None:
                text = f"checkpoint {self.final}: another rank could not write its part"
                raise RuntimeError(text) from None
            problem = mine[0] if isinstance(mine[0], OSError) else OSError(0, str(mine[0]))
            raise RecordWriteError(self.temporary, problem) from None


def start(
    engine: Engine,
    folder: Path,
    *,
    step: int,
    position: dict[str, Any],
    val_loss: float | None,
    staging: Staging,
    group: dist.ProcessGroup | None,
) -> Writing:
    """Copy the state of this step and start to write it; the save before must be over.

    val_loss: of an evaluation at this very step. group: for the collectives of saves. For all ranks
    together.
    """
    begin = perf_counter()
    final = folder / checkpoint_name(step)
    facts = {
        "step": step,
        "world_size": engine.ranks.world_size,
        "val_loss": val_loss,
        "scaler": engine.scaler.state_dict(),
    }
    writer = _Writer(final, facts, engine.plan.config.train)
    future: Any = async_save(
        own_share(engine, position),
        storage_writer=writer,
        async_stager=staging,
        process_group=group,
    )
    return Writing(
        final=final,
        temporary=writer.temporary,
        future=future,
        begin=begin,
        held_up_s=perf_counter() - begin,
    )


class Staging(AsyncStager):
    """Copies tensors to the host, into buffers that every save uses again."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies that training will not change."""
        on_device = False
        for name, tensor in state_dict.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(tensor, non_blocking=True)
            on_device = on_device or tensor.is_cuda
        if on_device:
            torch.cuda.current_stream().synchronize()
        return {name: self._buffers[name] for name in state_dict}

    def synchronize_staging(self) -> None:
        """`stage` returns when it is done."""

    def close(self) -> None:
        """Let go of the buffers."""
        self._buffers = {}


class _Writer(FileSystemWriter):
    """Writes under a temporary name; `finish`, which runs on rank 0 alone, makes it final."""

    def __init__(self, final: Path, facts: Mapping[str, Any], train: TrainSection) -> None:
        self.temporary = final.with_name(f".{final.name}.tmp")
        super().__init__(self.temporary)
        self._final, self._facts, self._train = final, facts, train

    def storage_meta(self) -> StorageMeta:
        """Without the path, which is only the temporary one."""
        return StorageMeta()

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """This rank's share. Raises OSError, which torch buries below an error of its own."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Every rank has written its share: digests, the final name, and room for the next one."""
        super().finish(metadata, results)
        sums = {file.name: sha256_of(file) for file in sorted(self.temporary.iterdir())}
        write_json(self.temporary / CHECKSUMS_JSON, {**self._facts, "sha256": sums})
        self.temporary.rename(self._final)
        sync_folder(self._final.parent)
        prune(self._final.parent, self._train)


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


def own_share(engine: Engine, position: dict[str, Any]) -> dict[str, Tensor]:
    """What this rank writes: its own state, and rank 0 what all hold alike."""
    shared = shared_state(engine) if engine.ranks.rank == 0 else {}
    return {**shared, **rank_state(engine, position)}


# -- which checkpoints of a run are kept ----------------------------------------------------------


def numbered(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step; what is being written or removed is none."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = {checkpoint_step(folder.name): folder for folder in folders}
    return {step: folder for step, folder in found.items() if step is not None}


def expendable(losses: Mapping[int, float | None], train: TrainSection) -> list[int]:
    """The steps that need not be kept, of checkpoints by step with their validation losses.

    Kept are the `keep_last` newest (0: all), those of every `keep_every` steps, and with
    `keep_best` the one with the lowest loss of those that were evaluated at their own step.
    """
    if not train.keep_last:
        return []
    steps = sorted(losses)
    kept = set(steps[-train.keep_last :])
    if train.keep_every:
        kept |= {step for step in steps if step % train.keep_every == 0}
    known = {step: loss for step, loss in losses.items() if loss is not None}
    finite = {step: loss for step, loss in known.items() if math.isfinite(loss)}
    if train.keep_best and finite:
        kept.add(min(finite, key=lambda step: (finite[step], step)))
    return [step for step in steps if step not in kept]


def prune(checkpoints: Path, train: TrainSection) -> None:
    """Remove what need not be kept. A half-removed one no longer has a checkpoint's name."""
    found = numbered(checkpoints)
    for step in expendable({step: _loss(folder) for step, folder in found.items()}, train):
        leaving = found[step].with_name(f".{found[step].name}.removed")
        found[step].rename(leaving)
        shutil.rmtree(leaving)


def _loss(folder: Path) -> float | None:
    try:
        loss = json.loads((folder / CHECKSUMS_JSON).read_bytes())["val_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever damaged it: it can be the newest, never the best
    return float(loss) if isinstance(loss, int | float) else None
