"""A folder like the checkout, on a machine without GPUs, in which documented lines are typed.

The configs have the names of the shipped ones and a model of a CPU's size; scripts and tests are
the checkout's own. What is typed goes to a real shell and starts the real entry points.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.hub import serve, write_shards
from tests.factory.programs import git
from tests.shared import once
from tests.train.launching import ROOT, SMOKE, free_port

_OWN = ("NSA_", "NCCL_", "TORCH_", "PYTORCH_", "RUNBOOK_", "PET_", "HF_", "GIT_", "CONFIG")
_LONGEST_S = 240


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What a typed block gave: exit code, both streams together, and the folder it was typed in."""

    code: int
    out: str
    desk: Path


def typed(
    factory: pytest.TempPathFactory, name: str, blocks: Mapping[str, Mapping[str, Any]]
) -> Typed:
    """The block of this name, typed once in a test run; what it comes after is typed before."""
    return once(factory, f"typed_{name}", lambda folder: _type(factory, folder, name, blocks))


def _type(
    factory: pytest.TempPathFactory,
    folder: Path,
    name: str,
    blocks: Mapping[str, Mapping[str, Any]],
) -> Typed:
    block, desk = blocks[name], folder / "desk"
    prepare(folder, desk)
    if before := block.get("after"):
        left = typed(factory, before, blocks).desk / "artifacts"
        shutil.copytree(left, desk / "artifacts", symlinks=True, dirs_exist_ok=True)
    line = str(block["typed"])
    for long, short in block.get("short", {}).items():
        assert long in line, f"{name}: {long} is not in the line"
        line = line.replace(long, short)
    with ExitStack() as stack:
        here = {"HF_HUB_OFFLINE": "1"}
        if block.get("hub"):
            write_shards(folder / "hub", shards=2, documents=60)
            here = {"HF_ENDPOINT": stack.enter_context(serve(folder / "hub")).address}
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=desk,
            env=environment(folder / "home") | here,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    return Typed(code=done.returncode, out=done.stdout, desk=desk)


def environment(home: Path) -> dict[str, str]:
    """A shell with the installed programs first on PATH, and none of this test run's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    programs = Path(sys.executable).parent
    return kept | {
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HOME": str(home),
        "HF_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # torchrun's own default port would be that of another test's torchrun.
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }


def prepare(folder: Path, desk: Path) -> None:
    """A clone with a remote, small configs under the documented names, scripts, shipped tests."""
    (folder / "home").mkdir()
    origin = folder / "origin"
    git(folder, "init", "--quiet", "--initial-branch", "main", str(origin))
    git(origin, "commit", "--quiet", "--allow-empty", "--message", "first")
    git(folder, "clone", "--quiet", str(origin), str(desk))
    for name in ("scripts", "nsa"):
        (desk / name).symlink_to(ROOT / name)
    (desk / "configs").mkdir()
    for path in sorted((ROOT / "configs").glob("m7c_*.yaml")):
        (desk / "configs" / path.name).write_text(yaml.safe_dump(small(path)))
    shutil.copytree(ROOT / "artifacts", desk / "artifacts", ignore=_all_but_gitignore)


def _all_but_gitignore(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name != ".gitignore"]


def small(path: Path) -> dict[str, Any]:
    """The config with a model, a length and a device for a CPU; the rest is its own."""
    own, cpu = (yaml.safe_load(one.read_text(encoding="utf-8")) for one in (path, SMOKE))
    train = own["train"] | {"seq_len": cpu["train"]["seq_len"], "log_every": 1, "eval_every": 0}
    runtime = own["runtime"] | {"device": "cpu"}
    return {**own, "model": cpu["model"], "nsa": cpu["nsa"], "runtime": runtime, "train": train}
