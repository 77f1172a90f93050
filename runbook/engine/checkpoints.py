"""The checkpoint that a launch goes on from: one of this run, whole, and the one it should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nsa.contract import HEARTBEATS, checkpoint_step
from nsa.contract.digests import damage, identity_of
from runbook.errors import RunbookError
from runbook.folder.rank_log import read_heartbeats
from runbook.records import Begun, Launch


def begin_at(run_root: Path, launch: Launch) -> Begun | None:
    """Where a launch that resumes another one of its phase begins.

    At that one's end (`Launch.after`, or the newest that it wrote), so that its own steps are all
    in its own files; where this checkpoint is damaged or is not the one that was written there, at
    the newest other one of the phase, one
    that a cut-off attempt saved included. None where the trainer told no digest of what it wrote.
    Raises `RunbookError` that names what is wrong with each if none is left.
    """
    told = [one for one in _told(run_root, launch) if one.step < launch.steps]
    before = f"{launch.phase}/{launch.resumes}/"
    end = launch.after or max((one.step for one in told if one.path.startswith(before)), default=0)
    refused: list[str] = []
    for one in sorted(
        told,
        key=lambda one: (one.path.startswith(before) and one.step == end, one.step),
        reverse=True,
    ):
        wrong = _wrong(run_root / one.path, one.sha256)
        if wrong is None:
            return one.model_copy(update={"refused": tuple(refused)})
        refused.append(f"{one.path}: {wrong}")
    if refused:
        raise RunbookError(f"no checkpoint of this run is left: {'; '.join(refused)}")
    return None


def _told(run_root: Path, launch: Launch) -> Iterator[Begun]:
    """The checkpoints that launches of the phase say they wrote, moved attempts included."""
    phase = run_root / launch.phase
    for folder in sorted(phase.iterdir() if phase.is_dir() else ()):
        path = folder / HEARTBEATS.name(0)
        if not path.is_file():
            continue
        for told in read_heartbeats(path, rank=0, relative_to=run_root).checkpoints:
            place, digest = str(told.get("path")), told.get("sha256")
            step = checkpoint_step(Path(place).name)
            if step is not None and isinstance(digest, str):
                where = f"{launch.phase}/{folder.name}/{place}"
                yield Begun(path=where, step=step, sha256=digest)


def _wrong(folder: Path, digest: str) -> str | None:
    try:
        if identity_of(folder) != digest:
            return "is not the checkpoint that was written there (its digest is another one)"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return damage(folder)
