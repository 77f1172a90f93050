"""Launches on the nodes of a cluster: an agent on each of them, and files that all of them share.

What a cluster has to do is in `cluster`; its launcher is a folder beside this one. Agents and
harness share only the run directory. What a launch means is decided where it is for every launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runbook.config.profile import Profile
from runbook.config.setup import RunOptions
from runbook.errors import RunbookError
from runbook.folder import CONSOLE_LOG
from runbook.launch.launcher_api import Launcher, LauncherKind, Running, Start, unread
from runbook.launch.local import nodes_problems
from runbook.launch.nodes import files
from runbook.launch.nodes.cluster import Cluster
from runbook.launch.nodes.running import NodesRun
from runbook.records import Launch
from runbook.records.launch import TORCHRUN


def problems_of(kind: LauncherKind, name: str, options: RunOptions, profile: Profile) -> list[str]:
    """What is wrong with the options, or with running this profile on nodes, in words."""
    own = f"--launcher {name}: a trainer of one's own runs on one machine only, so far"
    found = [own] * (profile.own_trainer is not None) + unread(options, kind.reads)
    return found + nodes_problems(options, profile)


def gpus_per_node(options: RunOptions, profile: Profile) -> int:
    """How many GPUs a run asks for on each node."""
    return profile.ranks // options.nodes if profile.has_gpu else 0


def chosen(launch: Launch, names: Sequence[str]) -> list[str]:
    """Of the nodes of a run, as far as they are known, those that the launch takes."""
    places = launch.on or range(min(launch.nodes, len(names)))
    return [names[place] for place in places] if names else []


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
        job = self.cluster.submit(start, job, files.kept_nodes(self._kept))
        try:
            files.write_record(path, job)
        except OSError:
            self.cluster.cancel(job, at_once=False)
            raise
        return self._running(start, job)

    def job(self, start: Start) -> files.Job:
        """What the agents of a launch run."""
        words = list(start.command.argv)
        torchrun = words[:1] == [TORCHRUN]
        return files.Job(
            run_token=start.token,
            nodes=start.launch.nodes,
            nproc=start.launch.nproc,
            argv=tuple(words[1:] if torchrun else words),
            torchrun=torchrun,
            folder=str(start.command.folder or ""),
            meet_s=self.cluster.meet_s or self.queue_s,
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
        return self._running(start, job)

    def nodes(self, run_dir: Path) -> list[Path]:
        """As in `Launcher`."""
        kept = files.kept_nodes(self._kept)
        folders = {folder: files.last_state(folder) for folder in files.node_folders(run_dir)}
        placed = []
        for folder, state in folders.items():
            if state is None:
                raise RunbookError(f"{folder / files.NODE_JSONL} is damaged")
            known = kept.index(folder.name) if folder.name in kept else len(kept)
            placed.append((known, state.index, folder.name, folder))
        return [folder for *_, folder in sorted(placed)]

    def is_own_file(self, name: str) -> bool:
        """As in `Launcher`."""
        return name in (CONSOLE_LOG, files.NODE_JSONL, files.ASKS_JSONL)

    @property
    def _kept(self) -> Path:
        return self.run_root / f"{self.cluster.name}_nodes.json"

    def _running(self, start: Start, job: files.Job) -> NodesRun:
        return NodesRun(
            start,
            job,
            self.cluster,
            queue_s=self.queue_s,
            note=self.note,
            # A job of more nodes adds the others.
            on_begin=lambda names: files.keep_nodes(self._kept, names),
        )
