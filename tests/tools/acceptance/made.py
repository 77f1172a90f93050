"""Stages made of small real programs, and the command run on them as a person would."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import yaml

from tests.cli.shell import Ended, runbook

DEVICE = "STAND-IN-no-GPU"
LIVE = "import pathlib, time; pathlib.Path(r'{mark}').write_text(str(__import__('os').getpid()))"


def stage(name: str, code: str, **changes: Any) -> dict[str, Any]:
    """A stage that runs a line of Python; `{out}` in it is the stage's folder."""
    command = {"name": "program", "argv": [sys.executable, "-c", code]}
    whole = {"name": name, "title": f"a test of {name}", "budget_s": 20, "least_s": 1}
    return {**whole, "commands": [command], **changes}


def says(text: str, code: int = 0) -> str:
    """A program that leaves a table and a result, and exits with `code`."""
    return (
        "import pathlib, json, sys; out = pathlib.Path(r'{out}'); "
        f"(out / 'result.json').write_text(json.dumps(dict(summary='{text}'))); "
        f"(out / 'table.md').write_text('| {text} |'); sys.exit({code})"
    )


def write_stages(folder: Path, *stages: dict[str, Any]) -> Path:
    """The file for --stages."""
    path = folder / "stages.yaml"
    document = {"schema_version": 1, "total_s": 1500, "stages": list(stages)}
    path.write_text(yaml.safe_dump(document))
    return path


def words(folder: Path, *more: str) -> tuple[str, ...]:
    """The command's words for this folder."""
    return (
        *("gpu-acceptance", "--stand-in", "--stages", str(folder / "stages.yaml")),
        *("--out", str(folder / "out"), "--work", str(folder / "work"), *more),
    )


def accept(folder: Path, *more: str, **variables: str) -> Ended:
    """Run the stages."""
    return runbook(*words(folder, *more), cwd=folder, **variables)


def handed_over(folder: Path, device: str = DEVICE) -> dict[str, Any]:
    """The summary, after a look at every file: few, whole, and the archive can be read."""
    out = folder / "out" / device
    files = sorted(path.name for path in out.iterdir())
    assert len(files) <= 8, files
    with tarfile.open(out / "everything.tar.gz") as tar:
        for member in tar:
            stream = tar.extractfile(member)
            assert stream is None or len(stream.read()) == member.size
    for name in ("summary.json", "results.json"):
        json.loads((out / name).read_text())
    assert (out / "summary.md").read_text().startswith("# Acceptance on ")
    document: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return document


def statuses(folder: Path, device: str = DEVICE) -> dict[str, str]:
    """How each stage stands, as handed over."""
    return {name: one["status"] for name, one in handed_over(folder, device)["stages"].items()}


def alive(pid: int) -> bool:
    """Is the process there, and no zombie?"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def fake_smi(folder: Path, listing: str, code: int = 0) -> dict[str, str]:
    """A PATH on which nvidia-smi lists these cards, whatever it is asked."""
    tools = folder / "bin"
    tools.mkdir()
    tool = tools / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{listing}'\nexit {code}\n")
    tool.chmod(0o755)
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
