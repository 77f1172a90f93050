"""The saves of a launch: begun while training goes on, told once written, and read back.

Is what lies on the disk what the run held when the save began, and which steps lie there? Some
elements of every tensor are noted as a save begins. When the next one begins, and when the launch
is over, rank 0 reads its newest checkpoint back and compares, bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.contract import CHECKPOINTS_DIR, CheckpointError, Event, Phase, checkpoint_name
from nsa.contract.digests import identity_of
from nsa.launch.output import Heartbeat, say
from nsa.launch.ranks import SAVING_GROUP
from nsa.step.engine import Engine
from nsa.train import checkpoint
from nsa.train.checkpoint import numbered, position_name, shared_state
from nsa.train.restore import read, read_position

# Of a tensor.
_ELEMENTS = 64
# So many elements of a checkpoint are read back, and so many at a time.
_MOST_READ, _AT_ONCE = 1 << 29, 1 << 26
# Steps and tensors that are named; more of them say no more.
_MOST_WRONG = 8


class Saves:
    """The saves of a launch, one at a time, with what the heartbeats say of them.

    Every method but `done`, `under_way`, `has` and `read_back` is for all ranks together.
    """

    def __init__(self, run_dir: Path, engine: Engine, heartbeat: Heartbeat) -> None:
        self.folder, self._engine, self._heartbeat = run_dir / CHECKPOINTS_DIR, engine, heartbeat
        self._noted = ReadBack(engine, token=heartbeat.token)
        self._staging = checkpoint.Staging()
        self._group: dist.ProcessGroup | None = None
        self._writing: checkpoint.Writing | None = None

    @property
    def done(self) -> bool:
        """Has a save ended, well or not, whose `finish` is still to come?"""
        return self._writing is not None and self._writing.future.done()

    @property
    def under_way(self) -> bool:
        """Is there a save whose `finish` is still to come?"""
        return self._writing is not None

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
        if self.under_way:
            self.finish()
        # Beside the steps, and before the new save may put the one before it away.
        self._noted.compare(self.folder)
        self._noted.note(step)
        if self._engine.ranks.grouped and self._group is None:
            # Of its own: the collectives of a save would mix with those of the steps.
            self._group = dist.new_group(backend="gloo", group_desc=SAVING_GROUP)
        self._writing = checkpoint.start(
            self._engine,
            self.folder,
            step=step,
            position=position,
            val_loss=val_loss,
            staging=self._staging,
            group=self._group,
        )

    def finish(self) -> Path:
        """The save that is under way, waited for where it has not ended.

        Raises RecordWriteError on a rank that could not write, RuntimeError on the others.
        """
        done, self._writing = self._writing, None
        if done is None:
            raise RuntimeError("no save is under way")
        done.wait(self._engine.ranks.rank)
        seconds, held_up_s = round(perf_counter() - done.begin, 4), round(done.held_up_s, 4)
        self._heartbeat.write(
            Event.CHECKPOINT,
            path=str(done.final.relative_to(self.folder.parent)),
            sha256=identity_of(done.final),
            seconds=seconds,
            held_up_s=held_up_s,
        )
        say(
            f"[checkpoint] {done.final} in {seconds:.2f} s, training held up for {held_up_s:.2f} s",
            rank=self._engine.ranks.rank,
        )
        return done.final

    def read_back(self) -> dict[str, Any] | None:
        """What the newest save holds against what the run held, as `ReadBack.report` says it."""
        return self._noted.report(self.folder)


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
        differ: dict[str, int] = {}
        for group in self._groups(names):
            saved = self._saved(folder / checkpoint_name(self._step), group)
            counts = {n: self._differ(saved.get(n), n, self._places[n]) for n in group}
            differ |= {name: count for name, count in counts.items() if count}
        if differ and len(self._wrong) < _MOST_WRONG:
            self._wrong.append(self._step)
        return sum(len(self._places[name]) for name in names), differ

    def _groups(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Together all of them; each is small enough to be held at once, or a single tensor."""
        group, size = list[str](), 0
        for name in names:
            if group and size + self._sizes[name] > _AT_ONCE:
                yield group
                group, size = [], 0
            group.append(name)
            size += self._sizes[name]
        if group:
            yield group

    def _differ(self, saved: Tensor | None, name: str, places: Tensor) -> int:
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
