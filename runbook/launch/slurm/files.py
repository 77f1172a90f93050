"""The files between the harness and the agents on the nodes, all of them in the run directory.

`job.json`: what every agent runs, and the job's number once Slurm gave it. `rendezvous.json`: where
torchrun's agents meet, by the first node. `nodes/NAME/node.jsonl`: by the agent of a node, how its
ranks are, and how the command ended. `nodes/NAME/asks.jsonl`: by the harness, a signal for a rank,
or for all to end. In the folder of the run `slurm_nodes.json`: the nodes that its jobs take.

What changes is appended to a file that is there already: of a network file system only that is seen
at once on another machine, while a new name in a folder may take half a minute.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from runbook.files import write_atomic
from runbook.folder.documents import read_json_object
from runbook.records.measurement import Record

NODES_FILE = "slurm_nodes.json"
JOB_JSON = "job.json"
RENDEZVOUS_JSON = "rendezvous.json"
NODES = "nodes"
NODE_JSONL = "node.jsonl"
ASKS_JSONL = "asks.jsonl"
# Carried by everything that an agent starts, beside the token of the launch.
NODE_TOKEN_VARIABLE = "RUNBOOK_NODE_TOKEN"  # noqa: S105 - the name of a variable
# Instead of a signal: read the stack of the rank from outside; end everything on the node.
READ_OUTSIDE = 0
END_ALL = -1


T = TypeVar("T", bound=Record)


class Job(Record):
    """What the agents of a launch run: `argv` on each of `nodes`, joined by torchrun or alone.

    `folder` is where it is executed. `job_id` is 0 until Slurm gave one.
    """

    schema_version: int = 1
    job_id: int = 0
    run_token: str
    nodes: int = Field(ge=1)
    nproc: int = Field(ge=1)
    argv: tuple[str, ...]
    torchrun: bool
    folder: str = ""
    submitted_at: str

    @property
    def name(self) -> str:
        """The job's name in Slurm, by which it is found and nothing else is."""
        return job_name(self.run_token)


def job_name(token: str) -> str:
    """The name of the job of a launch."""
    return f"runbook-{token}"


class RankOnNode(Record):
    """A rank's process as its node sees it. `exit_code` is what the kernel said of its end.

    gap_s: how far the rank's wall clock is behind the node's.
    """

    pid: int
    state: str
    gone: bool
    exit_code: int | None = None
    gap_s: float | None = None


class NodeEnd(Record):
    """What a node counted: the kernel's kills for lack of memory, and the places of its GPUs."""

    oom: tuple[int | None, int | None]
    slots: tuple[str, ...]


class NodeState(Record):
    """What a node's agent says. `code` is how the command ended by itself, `end` is
    the agent's last word.

    `stopped_by` is the signal that ended the agent itself, such as Slurm's SIGTERM.
    """

    node: str
    index: int
    console_bytes: int = 0
    code: int | None = None
    stopped_by: str = ""
    ranks: dict[int, RankOnNode] = Field(default_factory=dict)
    end: NodeEnd | None = None


class Rendezvous(Record):
    """Where torchrun's agents meet."""

    address: str
    port: int


class Ask(Record):
    """A signal for a rank, `READ_OUTSIDE` for its stack, `END_ALL` for everything on the node."""

    rank: int
    signal: int


def write_record(path: Path, record: Record) -> None:
    """The record as a file that is never seen half written. Raises OSError."""
    write_atomic(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[T]) -> T | None:
    """The record in the file; None while it is absent, or is not one of this kind."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def append_record(path: Path, record: Record) -> None:
    """One line more. Raises OSError."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(record.model_dump_json() + "\n")


def parse_record(line: bytes, kind: type[T]) -> T | None:
    """The record of a line; None if it is not one of this kind."""
    try:
        return kind.model_validate_json(line)
    except ValueError:
        return None


def last_state(folder: Path) -> NodeState | None:
    """What the agent of a node said last."""
    path = folder / NODE_JSONL
    lines = path.read_bytes().splitlines() if path.is_file() else []
    said = (parse_record(line, NodeState) for line in reversed(lines))
    return next((state for state in said if state is not None), None)


def kept_nodes(run_root: Path) -> tuple[str, ...]:
    """The nodes of a run, in the order in which launches of fewer take them; as far as known."""
    document, _ = read_json_object(run_root / NODES_FILE, [])
    return tuple((document or {}).get("nodes", ()))


def keep_nodes(run_root: Path, names: Sequence[str]) -> None:
    """Add those of a job that are new. Raises OSError."""
    known = kept_nodes(run_root)
    kept = list(dict.fromkeys((*known, *names)))
    if len(kept) > len(known):
        text = json.dumps({"schema_version": 1, "nodes": kept}, indent=2)
        write_atomic(run_root / NODES_FILE, f"{text}\n")


def node_folders(run_dir: Path) -> list[Path]:
    """The folders of the nodes that have an agent, by name."""
    root = run_dir / NODES
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
