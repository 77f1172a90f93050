"""The saves of a launch: begun while training goes on, told once written, read back at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa.contract import Event, Phase
from nsa.train.checkpoint import Checkpoints
from nsa.train.engine import Engine
from nsa.train.heartbeat import Heartbeat
from nsa.train.output import say
from nsa.train.read_back import ReadBack
from nsa.train.retention import Retention


class Saves:
    """Checkpoints with what the heartbeats say of them.

    Every method but `read_back` is for all ranks together.
    """

    def __init__(self, run_dir: Path, engine: Engine, heartbeat: Heartbeat) -> None:
        self._run_dir, self._heartbeat, self._rank = run_dir, heartbeat, engine.ranks.rank
        self._checkpoints = Checkpoints(run_dir, engine, Retention.of(engine.plan.config.train))
        self._noted = ReadBack(engine, token=heartbeat.token)

    @property
    def done(self) -> bool:
        """Has a save ended, well or not, whose `finish` is still to come? This rank's own view."""
        return self._checkpoints.done

    @property
    def under_way(self) -> bool:
        """Is there a save whose `finish` is still to come?"""
        return self._checkpoints.under_way

    def has(self, step: int) -> bool:
        """Does this rank see a checkpoint of this step?"""
        return self._checkpoints.has(step)

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
        self._noted.check(self._checkpoints.folder)
        self._noted.note(step)
        self._checkpoints.begin(step=step, position=position, val_loss=val_loss)

    def finish(self) -> None:
        """The save that is under way, waited for where it has not ended.

        Raises RecordWriteError on a rank that could not write, RuntimeError on the others.
        """
        done = self._checkpoints.finish()
        self._heartbeat.write(
            Event.CHECKPOINT,
            path=str(done.path.relative_to(self._run_dir)),
            sha256=done.sha256,
            seconds=done.seconds,
            held_up_s=done.held_up_s,
        )
        say(
            f"[checkpoint] {done.path} in {done.seconds:.2f} s, training held up for "
            f"{done.held_up_s:.2f} s",
            rank=self._rank,
        )

    def read_back(self) -> dict[str, Any] | None:
        """What the newest save holds against what the run held, as `ReadBack.told` says it."""
        return self._noted.told(self._checkpoints.folder)
