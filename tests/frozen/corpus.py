"""The kept runs: unpacked, asked by the program's own commands, and held against what was said."""

from __future__ import annotations

import difflib
import json
import math
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nsa.contract import CHECKPOINTS_DIR
from tests.cli.shell import inside

RUNS = Path(__file__).parent / "runs"
SUFFIX = ".tar.xz"
_OF_A_RUN = ("code", "err", "verdict", "scope", "caveats", "reasons", "interrupted")
_OF_A_ROW = (
    "id", "outcome", "code", "required", "question", "reason", "measurement", "evidence", "remedy",
)  # fmt: skip
_ASKED = {
    "judge": ("judge", "--json"),
    "verify": ("verify", "--json"),
    "inspect": ("inspect", "--json"),
    "report": ("report", "--format", "md"),
}
_NOTHING: tuple[object, ...] = ("", None, [], {})
# What names one of many alike.
_NAMES = ("id", "name", "path", "title")


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """One run. `commands` are typed in an empty folder; each ends with its code of `exits`.

    `profile` is what is written there as `mine.yaml`, which extends `cpu`. `beside` names the entry
    in whose folder it is made, after it. The first command is killed as soon as its run has the
    file `killed_at`. `cluster`: Slurm runs meanwhile. In a command, `{run}` is the run that the
    command before it made, `{plain}` a trainer that is not ours.
    """

    name: str
    what: str
    commands: tuple[str, ...]
    exits: tuple[int, ...]
    profile: dict[str, Any] = field(default_factory=dict)
    beside: str = ""
    killed_at: str = ""
    cluster: bool = False


FROZEN = tuple(
    Frozen(**one)
    for one in yaml.safe_load(Path(__file__).with_name("catalog.yaml").read_text("utf-8"))
)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the commands say of a run: exit code, errors and document of each; the report's text."""

    document: dict[str, Any]
    report: str


def names() -> list[str]:
    """Every kept run."""
    return sorted(path.name.removesuffix(SUFFIX) for path in RUNS.glob(f"*{SUFFIX}"))


def pack(name: str, run: Path) -> None:
    """Keep this run. Its checkpoints are left out: nothing but `verify` opens them."""

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if CHECKPOINTS_DIR in Path(entry.name).parts:
            return None
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    RUNS.mkdir(exist_ok=True)
    with tarfile.open(RUNS / f"{name}{SUFFIX}", "w:xz", preset=9) as archive:
        archive.add(run, run.name, filter=kept)


def unpack(name: str, folder: Path) -> Path:
    """The run's folder, below this one."""
    with tarfile.open(RUNS / f"{name}{SUFFIX}") as archive:
        archive.extractall(folder, filter="data")
    (run,) = folder.iterdir()
    return run


def asked(run: Path) -> Said:
    """Ask the program of today, from beside the run, so that no path of this machine is told."""
    told = {
        command: inside(words[0], run.name, *words[1:], cwd=run.parent)
        for command, words in _ASKED.items()
    }
    document: dict[str, Any] = {}
    for command, ended in told.items():
        document[command] = {"code": ended.code, "err": ended.err}
        if "--json" in _ASKED[command]:
            document[command] |= json.loads(ended.out)
    document["judge"] = _judged(document["judge"])
    return Said(document=_filled(document), report=told["report"].out)


def _judged(said: dict[str, Any]) -> dict[str, Any]:
    """What judging decides; what is copied from the run or shown about it is left out."""
    phases = [
        {
            "name": phase["name"],
            "checks": [{name: row.get(name) for name in _OF_A_ROW} for row in phase["checks"]],
        }
        for phase in said["phases"]
    ]
    return {name: said.get(name) for name in _OF_A_RUN} | {"phases": phases}


def _filled(value: Any) -> Any:
    """Without the fields that say nothing, which are half of all."""
    if isinstance(value, list):
        return [_filled(one) for one in value]
    if not isinstance(value, dict):
        return value
    filled = {name: _filled(one) for name, one in value.items()}
    return {name: one for name, one in filled.items() if one not in _NOTHING}


def expected(name: str, folder: Path = RUNS) -> Said:
    """What was said when it was accepted."""
    document = json.loads((folder / f"{name}.json").read_text("utf-8"))
    return Said(document=document, report=(folder / f"{name}.md").read_text("utf-8"))


def accept(name: str, said: Said, folder: Path = RUNS) -> None:
    """From now on this is what has to be said."""
    text = json.dumps(said.document, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(f"{text}\n", "utf-8")
    (folder / f"{name}.md").write_text(said.report, "utf-8")


def rows_that_differ(before: Said, now: Said) -> list[str]:
    """One line for each value that differs, then the lines of the report."""
    old, new = (dict(_values(said.document)) for said in (before, now))
    found = [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if _shown(old, key) != _shown(new, key) and not _same_number(old.get(key), new.get(key))
    ]
    then, today = before.report.splitlines(), now.report.splitlines()
    lines = difflib.unified_diff(then, today, "report then", "report now", n=0, lineterm="")
    return [*found, *lines]


def _values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf by the names on the way to it: `judge phases baseline checks ... outcome`."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(zip(_labels(value), value, strict=True))
    else:
        yield key, value
        return
    for name, one in items:
        yield from _values(one, f"{key} {name}".lstrip())


def _labels(values: list[Any]) -> list[str]:
    """What names each, with its place where several have that name or it has none."""
    named = [
        next((str(one[name]) for name in _NAMES if name in one), "")
        if isinstance(one, Mapping)
        else ""
        for one in values
    ]
    return [
        name if name and named.count(name) == 1 else f"{number} {name}".rstrip()
        for number, name in enumerate(named)
    ]


def _same_number(one: Any, other: Any) -> bool:
    """Up to what another processor or another version of SciPy makes of the last digits."""
    both = isinstance(one, float) and isinstance(other, float)
    return both and math.isclose(one, other, rel_tol=1e-9)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "(nothing)"
