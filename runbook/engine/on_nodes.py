"""Preflight on every node of a run: the collectors run there, as a job, and their facts come here.

The first node's facts are those of the run, since all rows about the machine mean the machines that
train; of the others it is kept what has to be equal everywhere, named `FACT@NODE`. Also the program
that runs on a node: `python -m runbook.engine.on_nodes`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nsa.contract.digests import sha256_of
from runbook.config.setup import Setup
from runbook.errors import RunbookError
from runbook.files import write_document
from runbook.folder import LAUNCH_JSON
from runbook.folder.facts import FACTS_FILE, finish, read_facts, write_facts
from runbook.launch import run_launch, set_aside
from runbook.launch.launcher_api import NODE_FOLDER_VARIABLE, Launcher
from runbook.launch.observer import Observer
from runbook.launch.supervision import LaunchOptions
from runbook.machine.preflight import collect_preflight
from runbook.records import Launch, LaunchResult
from runbook.records.evidence import Fact
from runbook.records.run import NODE_NAMES

# What has to be the same on all nodes of a run, or is held against a limit on each.
COMPARED = (
    *("package.sha256", "git.sha", "torch.version", "torch.cuda", "torch.nccl"),
    *("gpu.count", "gpu.names", "gpu.driver", "gpu.memory_total_mib", "gpu.pcie_gen"),
    *("gpu.pcie_width", "gpu.nvlink", "gpu.mig", "gpu.power_limit", "infiniband.present"),
    *("cpu.count", "memory.total_gib", "disk.free_gib", "disk.write_mib_s", "clock.offset_s"),
)
_CLOCK = "clock.json"
_TIMEOUT_S = 300.0


def collect_on_nodes(setup: Setup, options: LaunchOptions) -> tuple[dict[str, Fact], LaunchResult]:
    """The facts of all nodes, and how the job that collected them ended.

    Raises OSError if the disk refuses, RunbookError if what a node wrote is damaged.
    """
    profile, run_root = setup.profile, options.run_root
    launch = Launch(
        name="nodes",
        phase="preflight",
        kind="collect",
        argv=("python", "-m", "runbook.engine.on_nodes", profile.branch or "", profile.trainer),
        env=setup.cuda_exports,
        run_dir="preflight/nodes",
        nproc=setup.options.nodes,
        nodes=setup.options.nodes,
        steps=0,
        timeout_s=_TIMEOUT_S,
        purpose="what each node is: devices, driver, versions, disk, clock",
    )
    if (run_root / launch.run_dir).exists():
        set_aside(run_root / launch.run_dir, "unfinished")
    options.observer.note(f"preflight: asks {launch.nodes} node(s)")
    result = run_launch(launch, replace(options, observer=_Quiet(options.observer), retry=False))
    folder = run_root / launch.run_dir
    if not result.ok:  # the one fact that is left: why nothing is known
        return {NODE_NAMES: _names(run_root, folder, None, note=result.cause)}, result
    return _gathered(run_root, folder, options.launcher), result


class _Quiet(Observer):
    """Passes on what a person should read; the job is no launch of the plan."""

    def __init__(self, observer: Observer) -> None:
        self.note = observer.note  # type: ignore[method-assign]


def _gathered(run_root: Path, run_dir: Path, launcher: Launcher) -> dict[str, Fact]:
    # The run's first node is the one on which launches of one process run.
    folders = launcher.nodes(run_dir)
    if not folders:
        raise RunbookError(f"{run_dir} holds no node")
    for path in sorted(folders[0].iterdir()):
        left = path.name == FACTS_FILE or launcher.is_own_file(path.name)
        if path.is_file() and not left and not path.name.startswith("."):
            shutil.copyfile(path, run_root / path.name)
    facts = read_facts(folders[0])
    names = ", ".join(folder.name for folder in folders)
    facts[NODE_NAMES] = _names(run_root, run_dir, names)
    for folder in folders:
        facts |= _of_node(run_root, folder)
    return facts


def _names(run_root: Path, run_dir: Path, value: str | None, *, note: str = "") -> Fact:
    path = run_dir / LAUNCH_JSON
    where = path.relative_to(run_root).as_posix()
    return Fact(name=NODE_NAMES, value=value, path=where, sha256=sha256_of(path), note=note)


def _of_node(run_root: Path, folder: Path) -> dict[str, Fact]:
    below = folder.relative_to(run_root).as_posix()
    found = {}
    for name, fact in read_facts(folder).items():
        if name in COMPARED:
            own = f"{name}@{folder.name}"
            found[own] = replace(fact, name=own, path=f"{below}/{fact.path}")
    return found


def _clock(folder: Path) -> dict[str, Fact]:
    """How far this node's clock is from the clock of the shared folder's server, s."""
    probe = folder / ".clock"
    probe.touch()
    offset_s = round(time.time() - probe.stat().st_mtime, 3)
    probe.unlink()
    write_document(folder / _CLOCK, {"offset_s": offset_s})
    draft = Fact(name="clock.offset_s", value=offset_s, unit="s", path=_CLOCK)
    return finish([draft], folder)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    """Collect on this node, into the folder that its agent names."""
    folder = Path(environ[NODE_FOLDER_VARIABLE])
    facts = collect_preflight(
        folder,
        expected_branch=argv[0] or None,
        note=_say,
        trainer=argv[1],
        variables={k: v for k, v in environ.items() if k.startswith("CUDA_")},
    )
    write_facts(folder, facts | _clock(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
