"""The files between the harness and the agents on the nodes, all of them in the run directory.

`job.json`: what every agent runs, and the job's number where its cluster gives one.
`rendezvous.json`: where torchrun's agents meet, by the first node. `nodes/NAME/node.jsonl`: by the
agent of a node, how its ranks are, and how the command ended. `nodes/NAME/asks.jsonl`: by the
harness, a signal for a rank, or for all to end. In the folder of the run
`CLUSTER_nodes.json`: the nodes that its jobs take.

What changes is appended to a file that is there already: of a network file system only that is seen
at once on another machine, while a new name in a folder may take half a minute.

At the end the documents of all nodes become one, which the phases read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from runbook.files import write_atomic, write_document
from runbook.folder import (
    CONSOLE_LOG,
    DEVICES_AFTER_JSON,
    DEVICES_BEFORE_JSON,
    GPU_SAMPLES_CSV,
    KERNEL_LOG_JSON,
    LOAD_JSON,
)
from runbook.folder.launch.documents import GPU_SAMPLES, Load, load_of, read_json_object
from runbook.machine.kernel_log import KernelLine, parse_line
from runbook.records.measurement import Record

JOB_JSON = "job.json"
RENDEZVOUS_JSON = "rendezvous.json"
NODES = "nodes"
NODE_JSONL = "node.jsonl"
ASKS_JSONL = "asks.jsonl"
# Carried by everything that an agent starts, beside the token of the launch.
NODE_TOKEN_VARIABLE = "RUNBOOK_NODE_TOKEN"  # noqa: S105 - the name of a variable
# Instead of a signal: end everything on the node.
END_ALL = -1


T = TypeVar("T", bound=Record)


class Job(Record):
    """What the agents of a launch run: `argv` on each of `nodes`, joined if it is torchrun's.

    `folder` is where it is executed. `job_id` is 0 until a cluster that counts its jobs gave one.
    Its agents wait `meet_s` for each other, as long as a job may for its nodes, which may come one
    by one.
    """

    schema_version: int = 1
    job_id: int = 0
    run_token: str
    nodes: int = Field(ge=1)
    nproc: int = Field(ge=1)
    argv: tuple[str, ...]
    folder: str = ""
    meet_s: float = 120.0

    @property
    def name(self) -> str:
        """The job's name in its cluster, by which it is found and nothing else is."""
        return f"runbook-{self.run_token}"

    @property
    def called(self) -> str:
        """What a message calls it."""
        return f"job {self.job_id or self.name}"


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

    `stopped_by` is the signal that ended the agent itself, such as its cluster's SIGTERM.
    """

    node: str
    index: int
    code: int | None = None
    stopped_by: str = ""
    ranks: dict[int, RankOnNode] = Field(default_factory=dict)
    end: NodeEnd | None = None


class Rendezvous(Record):
    """Where torchrun's agents meet."""

    address: str
    port: int


class Ask(Record):
    """A signal for a rank, or `END_ALL` for everything on the node."""

    rank: int
    signal: int


def write_record(path: Path, record: Record) -> None:
    """The record as a file that is never seen half written. Raises OSError."""
    write_atomic(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[T]) -> T | None:
    """The record in the file; None while it is absent, or is not one of this kind."""
    try:
        return parse_record(path.read_bytes(), kind)
    except OSError:
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


def kept_nodes(path: Path) -> tuple[str, ...]:
    """The nodes of a run, in the order in which launches of fewer take them; as far as known."""
    document, _ = read_json_object(path, [])
    return tuple((document or {}).get("nodes", ()))


def keep_nodes(path: Path, names: Sequence[str]) -> None:
    """Add those of a job that are new. Raises OSError."""
    known = kept_nodes(path)
    kept = list(dict.fromkeys((*known, *names)))
    if len(kept) > len(known):
        write_document(path, {"nodes": kept})


def node_folders(run_dir: Path) -> list[Path]:
    """The folders of the nodes that have an agent, by name."""
    root = run_dir / NODES
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


_SUMS = ("cpus", "total_s", "busy_s", "own_s", "others_s", "steal_s")


def gather(run_dir: Path) -> tuple[list[KernelLine], Load | None]:
    """Write the launch's documents; returns what the kernels logged and the load of all nodes.

    Raises OSError.
    """
    folders = sorted(node_folders(run_dir), key=_index)
    _console(run_dir, folders)
    for name in (DEVICES_BEFORE_JSON, DEVICES_AFTER_JSON):
        _write(run_dir / name, _devices(_named(folders, name)))
    _samples(run_dir, folders)
    kernels = _named(folders, KERNEL_LOG_JSON)
    _write(run_dir / KERNEL_LOG_JSON, _kernel(kernels))
    load = _load(_named(folders, LOAD_JSON))
    _write(run_dir / LOAD_JSON, load)
    told = ((node, parse_line(text)) for node, one in kernels for text in one.get("lines", ()))
    lines = [replace(line, node=node) for node, line in told if line is not None]
    return lines, load_of([load]) if load else None


def _index(folder: Path) -> tuple[int, str]:
    state = last_state(folder)
    return (state.index if state else 1 << 30, folder.name)


# What nodes left, by their names.
_Documents = Sequence[tuple[str, Mapping[str, Any]]]


def _named(folders: Sequence[Path], name: str) -> _Documents:
    found = [(folder.name, read_json_object(folder / name, [])[0]) for folder in folders]
    return [(node, document) for node, document in found if document]


def _write(path: Path, document: Mapping[str, Any]) -> None:
    if document:
        write_document(path, document)


def _console(run_dir: Path, folders: Sequence[Path]) -> None:
    """One node after the other; what a node printed is not mixed with another's."""
    with (run_dir / CONSOLE_LOG).open("wb") as stream:
        for folder in folders:
            path = folder / CONSOLE_LOG
            text = path.read_bytes() if path.is_file() else b""
            stream.write(text if not text or text.endswith(b"\n") else text + b"\n")


def _told(documents: _Documents, *keys: str) -> dict[str, str]:
    """By key what all nodes say, or what each of them does."""
    found = {}
    for key in keys:
        texts = [(node, str(one.get(key, ""))) for node, one in documents]
        alike = len({text for _, text in texts}) == 1
        each = "; ".join(f"{node}: {text}" for node, text in texts if text)
        found[key] = texts[0][1] if alike else each
    return found


def _joined(documents: _Documents, *told: str, **more: object) -> dict[str, Any]:
    """The first node's document with what all of them say; empty where there is none."""
    return {**documents[0][1], **_told(documents, *told), **more} if documents else {}


def _devices(documents: _Documents) -> dict[str, Any]:
    """GPUs are counted on: those of the second node follow those of the first."""
    every = [{**gpu, "node": node} for node, one in documents for gpu in one.get("gpus", ())]
    gpus = [{**gpu, "index": place} for place, gpu in enumerate(every)]
    nodes = [node for node, _ in documents]
    return _joined(documents, "source", "problem", "driver", gpus=gpus, nodes=nodes)


def _samples(run_dir: Path, folders: Sequence[Path]) -> None:
    """The nodes' samples one after the other, with the places of the GPUs counted on."""
    rows: list[str] = []
    first = 0
    place = GPU_SAMPLES.columns.index("index")
    for folder in folders:
        path = folder / GPU_SAMPLES_CSV
        seen = -1
        for line in path.read_text("utf-8", "replace").splitlines()[1:] if path.is_file() else ():
            fields = line.split(",")
            if len(fields) == len(GPU_SAMPLES.columns) and fields[place].isdigit():
                seen = max(seen, int(fields[place]))
                fields[place] = str(first + int(fields[place]))
                rows.append(",".join(fields))
        first += seen + 1
    if rows:
        head = ",".join(GPU_SAMPLES.columns)
        write_atomic(run_dir / GPU_SAMPLES_CSV, "\n".join([head, *rows]) + "\n")


def _kernel(documents: _Documents) -> dict[str, Any]:
    said = [one for _, one in documents]
    return _joined(
        documents,
        *("source", "problem"),
        lost=any(one.get("lost") for one in said),
        left_out=sum(int(one.get("left_out", 0)) for one in said),
        lines=[text for one in said for text in one.get("lines", ())],
    )


def _load(documents: _Documents) -> dict[str, Any]:
    said = [one for _, one in documents]
    sums = {key: round(sum(float(one.get(key, 0)) for one in said), 3) for key in _SUMS}
    problem = next((str(one["problem"]) for one in said if one.get("problem")), "")
    wall_s = max((float(one.get("wall_s", 0)) for one in said), default=0.0)
    told = sums | {"cpus": int(sums["cpus"]), "wall_s": wall_s, "problem": problem}
    return _joined(documents, **told)
