"""Submits launches as jobs of Slurm, all on one set of nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runbook.config.profile import Profile
from runbook.config.setup import RunOptions, Setup
from runbook.errors import RunbookError
from runbook.files import utc_text
from runbook.folder.names import CONSOLE_LOG
from runbook.launch.launcher_api import Launcher, Running, Start
from runbook.launch.local import nodes_problems
from runbook.launch.slurm.commands import (
    cancel,
    find_job,
    host_names,
    job_state,
    missing_tools,
    submit,
)
from runbook.launch.slurm.files import (
    ASKS_JSONL,
    JOB_JSON,
    NODE_JSONL,
    Job,
    job_name,
    keep_nodes,
    kept_nodes,
    last_state,
    node_folders,
    read_record,
    write_record,
)
from runbook.launch.slurm.job import SlurmRun
from runbook.launch.slurm.script import Request, agent_script, printed_script, request_of
from runbook.records import Launch
from runbook.records.launch import TORCHRUN


@dataclass(kw_only=True)
class SlurmLauncher:
    """Starts launches on nodes of a cluster that share the run's folder and this Python.

    `queue_s` is how long a job may wait for its nodes. `note` is told what a person should read.
    """

    run_root: Path
    request: Request
    queue_s: float
    note: Callable[[str], None]
    here: bool = field(default=False, init=False)

    def start(self, start: Start) -> Running:
        """As in `Launcher`. Raises SlurmError."""
        words = list(start.command.argv)
        torchrun = words[:1] == [TORCHRUN]
        job = Job(
            run_token=start.token,
            nodes=start.launch.nodes,
            nproc=start.launch.nproc,
            argv=tuple(words[1:] if torchrun else words),
            torchrun=torchrun,
            folder=str(start.command.folder or ""),
            submitted_at=utc_text(),
        )
        path = start.run_dir / JOB_JSON
        write_record(path, job)
        options = self.request.words(start.launch, name=job.name, names=kept_nodes(self.run_root))
        options += ["--output=/dev/null", "--error=/dev/null"]
        number = submit(options, agent_script(start.run_dir), _for_sbatch(start))
        job = job.model_copy(update={"job_id": number})
        try:
            write_record(path, job)
        except OSError:
            cancel(number)
            raise
        return self._running(start, job)

    def adopt(self, start: Start) -> Running | None:
        """As in `Launcher`: the job is found by its number, or by the token in its name."""
        job = read_record(start.run_dir / JOB_JSON, Job)
        if job is None or job.run_token != start.token:
            return None
        number = job.job_id or find_job(job_name(start.token))
        known = bool(number) and job_state(number) is not None
        if not known and not _has_ended(start, job):
            return None
        self.note(f"{start.launch.name}: job {number} outlived its harness and is watched again")
        return self._running(start, job.model_copy(update={"job_id": number}))

    def nodes(self, run_dir: Path) -> list[Path]:
        """As in `Launcher`."""
        kept = kept_nodes(self.run_root)
        folders = {folder: last_state(folder) for folder in node_folders(run_dir)}
        placed = []
        for folder, state in folders.items():
            if state is None:
                raise RunbookError(f"{folder / NODE_JSONL} is damaged")
            known = kept.index(folder.name) if folder.name in kept else len(kept)
            placed.append((known, state.index, folder.name, folder))
        return [folder for *_, folder in sorted(placed)]

    def is_own_file(self, name: str) -> bool:
        """As in `Launcher`."""
        return name in (CONSOLE_LOG, NODE_JSONL, ASKS_JSONL)

    def _running(self, start: Start, job: Job) -> SlurmRun:
        return SlurmRun(start, job, queue_s=self.queue_s, note=self.note, on_begin=self._remember)

    def _remember(self, expression: str) -> None:
        """Keep the nodes of a job for all that follow; one of more nodes adds the others."""
        keep_nodes(self.run_root, host_names(expression))


class Slurm:
    """Jobs of Slurm, as `--launcher` names them."""

    here = False

    def lacks(self) -> list[str]:
        """As in `LauncherKind`."""
        absent = ", ".join(missing_tools())
        words = f"--launcher slurm: no {absent} here; run it where jobs are submitted"
        return [words] if absent else []

    def problems(self, options: RunOptions, profile: Profile) -> list[str]:
        """As in `LauncherKind`."""
        own = "--launcher slurm: a trainer of one's own runs on one machine only, so far"
        return [own] * (profile.own_trainer is not None) + nodes_problems(options, profile)

    def launcher(self, setup: Setup, run_root: Path, note: Callable[[str], None]) -> Launcher:
        """As in `LauncherKind`."""
        queue_s = setup.options.queue_s
        return SlurmLauncher(
            run_root=run_root, request=request_of(setup), queue_s=queue_s, note=note
        )

    def printed(self, launch: Launch, setup: Setup) -> str:
        """As in `LauncherKind`: the batch script of its job."""
        return printed_script(launch, request_of(setup))


def _has_ended(start: Start, job: Job) -> bool:
    """Has every node written all that it had to say?"""
    said = [last_state(folder) for folder in node_folders(start.run_dir)]
    return sum(state is not None and state.end is not None for state in said) >= job.nodes


def _for_sbatch(start: Start) -> dict[str, str]:
    """The launch's environment, which the job inherits, and which cluster is asked."""
    cluster = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    return {**start.environment, **cluster}
