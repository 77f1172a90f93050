"""A run as TensorBoard events, written by the package `tensorboard` without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from nsa.contract import TRAINING_CSV
from runbook.errors import RunbookError, UsageError
from runbook.folder.launch import read_training_csv
from runbook.records import LaunchEntry, RunRecord
from runbook.tools.export.numbers import Number, numbers_of

_NO_CURVE = ("step", "block", "warmup", "arm")


def write_tensorboard(record: RunRecord, run_root: Path, target: Path) -> list[Path]:
    """Write events below `target/RUN_ID`; return the folders that hold some.

    The numbers of the checks and the verdict go into the first, and the columns of each launch's
    training.csv, step by step, into one folder each. Nothing that is there is changed. Raises
    UsageError if the run's folder exists already, RunbookError if the package is missing.
    """
    board = _Board()
    folder = target / record.run_id
    if folder.exists():
        raise UsageError(f"{folder} exists", hint="remove it, or name another folder")
    summary = [(number.name, _step(number), number.value) for number in numbers_of(record)]
    at = datetime.fromisoformat(record.finished_at or record.started_at).timestamp()
    board.write(folder, [(at, *point) for point in summary], text=record.headline)
    folders = [folder]
    for entry in (entry for phase in record.phases for entry in phase.launches):
        points = list(_curves(entry, run_root))
        if points:
            folders.append(folder / entry.launch.phase / entry.launch.name)
            board.write(folders[-1], points)
    return folders


def _step(number: Number) -> int:
    """Where a number stands on the axis: the last step that it rests on."""
    return number.last_step or 0


def _curves(entry: LaunchEntry, run_root: Path) -> Iterator[tuple[float, str, int, float]]:
    """Time, column, step and value of each cell of a launch's training.csv."""
    path = run_root / entry.launch.run_dir / TRAINING_CSV
    if not path.is_file():
        return
    frame = read_training_csv(path, relative_to=run_root).frame
    begun = entry.result.started_at
    start = datetime.fromisoformat(begun).timestamp() if begun else path.stat().st_mtime
    times = start + frame["dt_s"].cumsum() if "dt_s" in frame else [start] * len(frame)
    steps = [int(step) for step in frame["step"]]
    for name in frame.columns:
        if name not in _NO_CURVE:
            for at, step, value in zip(times, steps, frame[name], strict=True):
                yield float(at), str(name), step, float(value)


class _Board:
    """The package's own writer and messages, imported here only."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.compat.proto import tensor_shape_pb2 as shape_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise RunbookError(
                "--to tensorboard needs the package tensorboard "
                f"({error}); pip install 'nsa-runbook[tensorboard]'"
            ) from error
        self._writer, self._events, self._summaries = EventFileWriter, event_pb2, summary_pb2
        self._tensors, self._shapes = tensor_pb2, shape_pb2

    def write(
        self, folder: Path, points: Iterable[tuple[float, str, int, float]], *, text: str = ""
    ) -> None:
        """One file of events: scalars at their time and step, and a text `verdict`."""
        last = 0.0
        with closing(self._writer(str(folder))) as writer:
            for at, tag, step, value in points:
                last = at
                if not math.isnan(value):
                    scalar = self._summaries.Summary.Value(tag=tag, simple_value=value)
                    writer.add_event(self._event(at, step, scalar))
            if text:
                writer.add_event(self._event(last, 0, self._text("verdict", text)))

    def _event(self, at: float, step: int, value: Any) -> Any:
        summary = self._summaries.Summary(value=[value])
        return self._events.Event(wall_time=at, step=step, summary=summary)

    def _text(self, tag: str, text: str) -> Any:
        """A value for the page of texts, as its plugin reads it."""
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        shape = self._shapes.TensorShapeProto(dim=[self._shapes.TensorShapeProto.Dim(size=1)])
        tensor = self._tensors.TensorProto(
            dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape
        )
        meta = self._summaries.SummaryMetadata(plugin_data=plugin)
        return self._summaries.Summary.Value(tag=tag, metadata=meta, tensor=tensor)
