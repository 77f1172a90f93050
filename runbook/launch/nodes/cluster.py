"""What a cluster is to the launches of a run: it is asked for jobs, and how these stand."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from runbook.launch.launcher_api import Start
from runbook.launch.nodes import files
from runbook.records import End


class Standing(Protocol):
    """A job as its cluster tells of it."""

    @property
    def waits(self) -> bool:
        """True while it has not all of its nodes."""

    @property
    def over(self) -> bool:
        """True once nothing of it can run any more, or only what ran is waited for."""

    @property
    def why(self) -> str:
        """Why it waits, in the cluster's words."""

    def names(self) -> tuple[str, ...]:
        """Its nodes."""

    def ended(self, job: files.Job, run_dir: Path, *, gone: bool, silent: str) -> End:
        """What it means that it is over, and not all agents have said how their command ended.

        `gone`: the cluster no longer knows it. `silent`: how many nodes did not say, in words.
        """


class Cluster(Protocol):
    """What a run's launches ask of a cluster; a job is asked for, followed and ended by it alone.

    `name` begins its files. `pending` is a job of which nothing is known yet. A job that has
    nothing left to do is over by itself within `by_itself_s`. Its agents wait `meet_s` for each
    other; 0 where its nodes come one by one, so that they may wait as long as the job.
    """

    name: str
    title: str
    pending: Standing
    by_itself_s: float
    meet_s: float

    def submit(self, start: Start, job: files.Job, names: tuple[str, ...]) -> files.Job:
        """Have the job's agents started, on `names` as far as known. Raises RefusedError."""

    def found(self, job: files.Job) -> files.Job:
        """The job with its number, if its harness was killed before it wrote that down."""

    def look(self, job: files.Job) -> Standing | None:
        """How it stands; None if it is not known (any more). Raises RefusedError without answer."""

    def is_listed(self, job: files.Job) -> bool:
        """Does the cluster still hold nodes for the job, or wait to?"""

    def cancel(self, job: files.Job, *, at_once: bool) -> None:
        """End it, with or without time for its programs; one that is over stays as it is."""

    def calls(self, node: str) -> str:
        """What the cluster says of a node."""
