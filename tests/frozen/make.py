"""Make the kept runs anew: `python -m tests.frozen.make [NAME ...]`, on a machine with two cores.

Each is a real run of the installed program, by the commands of the catalog, in a new folder, which
stays if one of them does not end as it has to. Its paths, and that of the checkout, are in the
archive: make it where nobody's name is in them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from runbook.engine.verify import verify_run
from tests.frozen import corpus
from tests.frozen.accept import main as accept
from tests.frozen.corpus import FROZEN, Frozen
from tests.nodes.slurm import Cluster

ROOT = Path(__file__).resolve().parents[2]
_PLAIN = ROOT / "tests/own/trainers/plain_ddp.py"
_KEPT = ("HOME", "LANG")


def main(wanted: Sequence[str]) -> int:
    """Make these, or all; 1 if one does not end as it has to."""
    known = {one.name: one for one in FROZEN}
    work = Path(tempfile.mkdtemp(prefix="frozen-"))
    runs = {name: made(known[name], work, known) for name in wanted or known}
    # Only now: an archive is a change of the checkout to the runs after it.
    for name, run in runs.items():
        if run is not None and not differs(run):
            corpus.pack(name, run)
            accept([name])
        else:
            print(f"{name}: not kept, see {work}", file=sys.stderr)
            runs[name] = None
    if None in runs.values():
        return 1
    shutil.rmtree(work)
    return 0


def made(one: Frozen, work: Path, known: dict[str, Frozen]) -> Path | None:
    """The folder of its run; None if a command ended otherwise than it has to."""
    folder = work / (one.beside or one.name)
    if one.beside and not folder.is_dir() and made(known[one.beside], work, known) is None:
        return None
    folder.mkdir(exist_ok=True)
    if one.profile:
        title = f"2 gloo ranks on CPU, {one.profile['name']}"
        profile = {"extends": "cpu", "title": title, **one.profile}
        (folder / "mine.yaml").write_text(yaml.safe_dump(profile, sort_keys=False), "utf-8")
    before = set(_runs(folder))
    with _cluster(work / "slurm", wanted=one.cluster) as more:
        for number, (command, code) in enumerate(zip(one.commands, one.exits, strict=True)):
            new = [path.name for path in _runs(folder) if path not in before]
            words = shlex.split(command.format(run=new[0] if new else "", plain=_PLAIN))
            ended = _typed(words, folder, more, one.killed_at if number == 0 else "")
            if ended != code:
                print(f"{one.name}: {command}: exit code {ended}, not {code}", file=sys.stderr)
                return None
    (run,) = set(_runs(folder)) - before
    return run


def differs(run: Path) -> bool:
    """Is it, whole, another one than it says?"""
    found = verify_run(run).differences
    print(*found, sep="\n", file=sys.stderr)
    return bool(found)


def _runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("artifacts/*/events.jsonl"))


def _typed(words: list[str], folder: Path, more: dict[str, str], killed_at: str) -> int:
    """Its exit code; nothing of the caller's shell is in its environment."""
    scripts = Path(sys.executable).parent
    path = os.pathsep.join([str(scripts), os.defpath, "/usr/sbin"])
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment = {**kept, "PATH": path, "PYTHONPATH": str(ROOT), **more}
    print(f"$ {shlex.join(words)}", file=sys.stderr)
    program = subprocess.Popen([str(scripts / words[0]), *words[1:]], cwd=folder, env=environment)
    while killed_at and program.poll() is None:
        if list(folder.glob(f"artifacts/*/{killed_at}")):
            program.kill()
            break
        time.sleep(0.1)
    return program.wait()


@contextmanager
def _cluster(folder: Path, *, wanted: bool) -> Iterator[dict[str, str]]:
    """The variables that make Slurm's tools talk to a cluster of two nodes, if it is wanted."""
    if not wanted:
        yield {}
        return
    cluster = Cluster(folder)
    try:
        cluster.up()
        yield cluster.environment
    finally:
        cluster.down()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
