"""Launches on the nodes of a cluster: an agent on each of them, and files that all of them share.

A `Cluster` is asked for jobs, and how these stand; its launcher is a folder beside this one. Agents
and harness share only the run directory. What a launch means is decided where it is for every
launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runbook.config import Profile
from runbook.config.setup import RunOptions, Setup
from runbook.errors import RunbookError
from runbook.folder import CONSOLE_LOG
from runbook.launch.launcher_api import Launcher, LauncherKind, Running, Start
from runbook.launch.nodes import files
from runbook.launch.nodes.running import NodesRun
from runbook.records import End, Launch

# Where the agents of a printed command meet.
RENDEZVOUS_PORT = 29400


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
    nothing left to do is over by itself within `by_itself_s`.
    """

    name: str
    title: str
    pending: Standing
    by_itself_s: float

    def submit(self, start: Start, job: files.Job, on: Sequence[str]) -> files.Job:
        """Have the job's agents started, on these nodes and on any beyond. Raises RefusedError."""

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


def gpus_per_node(options: RunOptions, profile: Profile) -> int:
    """How many GPUs a run asks for on each node."""
    return profile.ranks // options.nodes if profile.has_gpu else 0


def chosen(launch: Launch, names: Sequence[str]) -> list[str]:
    """Of the nodes of a run, as far as they are known, those that the launch takes."""
    places = launch.on or range(min(launch.nodes, len(names)))
    return [names[place] for place in places] if names else []


class NodesKind(LauncherKind):
    """A launcher of a cluster, which `name` calls."""

    name: str

    def cluster(self, setup: Setup, run_root: Path) -> Cluster:
        """The cluster as a run asks it."""
        raise NotImplementedError

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        own = f"--launcher {self.name}: a trainer of one's own runs on one machine only, so far"
        return [own] * (profile.own_trainer is not None) + super().problems(options, profile)

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """As in `LauncherKind`."""
        cluster, queue_s = self.cluster(setup, run_root), setup.options.queue_s
        return NodesLauncher(run_root=run_root, cluster=cluster, queue_s=queue_s, note=note)


@dataclass(kw_only=True)
class NodesLauncher(Launcher):
    """Starts launches on nodes of a cluster that share the run's folder.

    `queue_s` is how long a job may wait for its nodes. `note` is told what a person should read.
    """

    run_root: Path
    cluster: Cluster
    queue_s: float
    note: Callable[[str], None]

    def start(self, start: Start) -> Running:
        """As in `Launcher`. Raises RefusedError."""
        job = self.job(start)
        path = start.run_dir / files.JOB_JSON
        files.write_record(path, job)
        job = self.cluster.submit(start, job, chosen(start.launch, files.kept_nodes(self.kept)))
        try:
            files.write_record(path, job)
        except OSError:
            self.cluster.cancel(job, at_once=False)
            raise
        return NodesRun(self, start, job)

    def job(self, start: Start) -> files.Job:
        """What the agents of a launch run."""
        return files.Job(
            run_token=start.token,
            nodes=start.launch.nodes,
            nproc=start.launch.nproc,
            argv=start.command.argv,
            folder=str(start.command.folder or ""),
            meet_s=self.queue_s,
        )

    def adopt(self, start: Start) -> Running | None:
        """As in `Launcher`: the job is found by its number, or by the token in its name."""
        job = files.read_record(start.run_dir / files.JOB_JSON, files.Job)
        if job is None or job.run_token != start.token:
            return None
        job = self.cluster.found(job)
        said = [files.last_state(folder) for folder in files.node_folders(start.run_dir)]
        # Every node may have written all that it had to say.
        ended = sum(state is not None and state.end is not None for state in said) >= job.nodes
        if not ended and self.cluster.look(job) is None:
            return None
        self.note(f"{start.launch.name}: {job.called} outlived its harness and is watched again")
        return NodesRun(self, start, job)

    def nodes(self, run_dir: Path) -> list[Path]:
        """As in `Launcher`."""
        kept = files.kept_nodes(self.kept)
        placed = []
        for folder in files.node_folders(run_dir):
            if (state := files.last_state(folder)) is None:
                raise RunbookError(f"{folder / files.NODE_JSONL} is damaged")
            known = kept.index(folder.name) if folder.name in kept else len(kept)
            placed.append((known, state.index, folder.name, folder))
        return [folder for *_, folder in sorted(placed)]

    def is_own_file(self, name: str) -> bool:
        """As in `Launcher`."""
        return name in (CONSOLE_LOG, files.NODE_JSONL, files.ASKS_JSONL)

    @property
    def kept(self) -> Path:
        """The file of the nodes that the jobs of the run take."""
        return self.run_root / f"{self.cluster.name}_nodes.json"
