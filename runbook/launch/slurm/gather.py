"""The documents of all nodes of a launch, as the one document that the phases read.

What a node wrote stays in its folder; a reader that knows of one machine sees the sum of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runbook.files import write_atomic
from runbook.folder.documents import GPU_SAMPLES, read_json_object
from runbook.folder.kernel_lines import KernelLine, parse_line
from runbook.folder.load import Load, load_of
from runbook.folder.names import (
    CONSOLE_LOG,
    DEVICES_AFTER_JSON,
    DEVICES_BEFORE_JSON,
    GPU_SAMPLES_CSV,
    KERNEL_LOG_JSON,
    LOAD_JSON,
)
from runbook.launch.slurm.files import last_state, node_folders

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
    kernel = _kernel(_named(folders, KERNEL_LOG_JSON))
    _write(run_dir / KERNEL_LOG_JSON, kernel)
    load = _load([document for _, document in _named(folders, LOAD_JSON)])
    _write(run_dir / LOAD_JSON, load)
    lines = (parse_line(text) for text in kernel.get("lines", ()))
    return [line for line in lines if line is not None], load_of([load]) if load else None


def _index(folder: Path) -> tuple[int, str]:
    state = last_state(folder)
    return (state.index if state else 1 << 30, folder.name)


def _named(folders: Sequence[Path], name: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = [(folder.name, read_json_object(folder / name, [])[0]) for folder in folders]
    return [(node, document) for node, document in found if document]


def _write(path: Path, document: Mapping[str, Any]) -> None:
    if document:
        write_atomic(path, json.dumps(document, indent=2) + "\n")


def _console(run_dir: Path, folders: Sequence[Path]) -> None:
    """One node after the other; what a node printed is not mixed with another's."""
    with (run_dir / CONSOLE_LOG).open("wb") as stream:
        for folder in folders:
            path = folder / CONSOLE_LOG
            text = path.read_bytes() if path.is_file() else b""
            stream.write(text if not text or text.endswith(b"\n") else text + b"\n")


def _told(documents: Sequence[tuple[str, Mapping[str, Any]]], *keys: str) -> dict[str, str]:
    """By key what all nodes say, or what each of them does."""
    found = {}
    for key in keys:
        texts = [(node, str(one.get(key, ""))) for node, one in documents]
        alike = len({text for _, text in texts}) == 1
        each = "; ".join(f"{node}: {text}" for node, text in texts if text)
        found[key] = texts[0][1] if alike else each
    return found


def _devices(documents: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """GPUs are counted on: those of the second node follow those of the first."""
    if not documents:
        return {}
    gpus: list[dict[str, Any]] = []
    for node, document in documents:
        first = len(gpus)
        gpus += [
            {**gpu, "index": first + place, "node": node}
            for place, gpu in enumerate(document.get("gpus", ()))
        ]
    told = _told(documents, "source", "problem", "driver")
    first_document = documents[0][1]
    return {**first_document, **told, "gpus": gpus, "nodes": [node for node, _ in documents]}


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


def _kernel(documents: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    if not documents:
        return {}
    return {
        **documents[0][1],
        **_told(documents, "source", "problem"),
        "lost": any(one.get("lost") for _, one in documents),
        "others": sum(int(one.get("others", 0)) for _, one in documents),
        "left_out": sum(int(one.get("left_out", 0)) for _, one in documents),
        "lines": [text for _, one in documents for text in one.get("lines", ())],
    }


def _load(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not documents:
        return {}
    sums = {key: round(sum(float(one.get(key, 0)) for one in documents), 3) for key in _SUMS}
    return {
        **documents[0],
        **sums,
        "cpus": int(sums["cpus"]),
        "wall_s": max(float(one.get("wall_s", 0)) for one in documents),
        "problem": next((str(one["problem"]) for one in documents if one.get("problem")), ""),
    }
