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

from nsa.contract import CHECKPOINTS_DIR, CHECKSUMS_JSON, Event, Phase, checkpoint_name
from nsa.contract.digests import identity_of, sha256_of
from nsa.contract.writing import sync_folder
from nsa.launch.output import Heartbeat, RecordWriteError, say, write_json
from nsa.launch.ranks import SAVING_GROUP
from nsa.settings import TrainSection
from nsa.step.engine import Engine
from nsa.train.restore import ReadBack, numbered, rank_state, shared_state

# Python 3.11.2 (Debian 12) keeps a member of an enumeration as a call of `getattr`, which a reader
# that runs nothing refuses. By its value is how later ones keep it.
copyreg.pickle(_MEM_FORMAT_ENCODING, lambda member: (_MEM_FORMAT_ENCODING, (member.value,)))


class Saves:
    """The saves of a launch, one at a time, with what the heartbeats say of them.

    Every method but `done`, `has` and `read_back` is for all ranks together.
    """

    def __init__(self, run_dir: Path, engine: Engine, heartbeat: Heartbeat) -> None:
        self.folder, self._engine, self._heartbeat = run_dir / CHECKPOINTS_DIR, engine, heartbeat
        self._noted = ReadBack(engine, token=heartbeat.token)
        self._staging = Staging()
        self._group: dist.ProcessGroup | None = None
        self._writing: _Writing | None = None

    @property
    def done(self) -> bool:
        """Has a save ended, well or not, whose `finish` is still to come?"""
        return self._writing is not None and self._writing.future.done()

    def has(self, step: int) -> bool:
        """Is there a checkpoint of this step?"""
        return (self.folder / checkpoint_name(step)).exists()

    def begin(self, *, step: int, position: dict[str, Any], val_loss: float | None) -> None:
        """Start to write this step; the save before it is waited for.

        position: in the data, of the step's last batch. val_loss: of an evaluation at this very
        step. Raises as `finish` does.
        """
        self._heartbeat.phase = Phase.CHECKPOINT
        self._heartbeat.write(Event.CHECKPOINT_START)
        self.finish()
        # Beside the steps, and before the new save may put the one before it away.
        self._noted.compare(self.folder)
        self._noted.note(step)
        engine = self._engine
        if engine.ranks.grouped and self._group is None:
            # Of its own: the collectives of a save would mix with those of the steps.
            self._group = dist.new_group(backend="gloo", group_desc=SAVING_GROUP)
        begin = perf_counter()
        facts = {
            "step": step,
            "world_size": engine.ranks.world_size,
            "val_loss": val_loss,
            "scaler": engine.scaler.state_dict(),
        }
        writer = _Writer(self.folder / checkpoint_name(step), facts, engine.plan.config.train)
        future: Any = async_save(
            own_share(engine, position),
            storage_writer=writer,
            async_stager=self._staging,
            process_group=self._group,
        )
        held_up_s = perf_counter() - begin
        self._writing = _Writing(writer=writer, future=future, begin=begin, held_up_s=held_up_s)

    def finish(self) -> None:
        """The save that is under way, if there is one, waited for where it has not ended.

        Raises RecordWriteError on a rank that could not write, RuntimeError on the others.
        """
        done, self._writing = self._writing, None
        if done is None:
            return
        done.wait(self._engine.ranks.rank)
        final = done.writer.final
        seconds, held_up_s = round(perf_counter() - done.begin, 4), round(done.held_up_s, 4)
        self._heartbeat.write(
            Event.CHECKPOINT,
            path=str(final.relative_to(self.folder.parent)),
            sha256=identity_of(final),
            seconds=seconds,
            held_up_s=held_up_s,
        )
        say(
            f"[checkpoint] {final} in {seconds:.2f} s, training held up for {held_up_s:.2f} s",
            rank=self._engine.ranks.rank,
        )

    def read_back(self) -> dict[str, Any] | None:
        """What the newest save holds against what the run held, as `ReadBack.report` says it."""
        return self._noted.report(self.folder)


@dataclass(frozen=True, kw_only=True)
class _Writing:
    """A save that was started. `held_up_s`: how long training stood still for it."""

    writer: _Writer
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
                shutil.rmtree(self.writer.temporary, ignore_errors=True)
            mine = error.failures.get(rank)
            if mine is None:
                text = f"checkpoint {self.writer.final}: another rank could not write its part"
                raise RuntimeError(text) from None
            problem = mine[0] if isinstance(mine[0], OSError) else OSError(0, str(mine[0]))
            raise RecordWriteError(self.writer.temporary, problem) from None


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
        self.final, self._facts, self._train = final, facts, train

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
        self.temporary.rename(self.final)
        sync_folder(self.final.parent)
        prune(self.final.parent, self._train)


def own_share(engine: Engine, position: dict[str, Any]) -> dict[str, Tensor]:
    """What this rank writes: its own state, and rank 0 what all hold alike."""
    shared = shared_state(engine) if engine.ranks.rank == 0 else {}
    return {**shared, **rank_state(engine, position)}


# -- which checkpoints of a run are kept -----------------------------------------------------------


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
