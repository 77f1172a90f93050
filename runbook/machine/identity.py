"""Commit, software and machine of a run, as few words: are two parts of it comparable?

What would identify a machine or its owner is a digest. A record that an earlier version wrote lacks
what that version did not know; only what both know is compared. Which code an interpreter imports
is asked without importing it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from nsa.contract.digests import installed_digest, package_digest, sha256_of
from nsa.torch_env import VISIBLE_DEVICES
from runbook.errors import UsageError
from runbook.files import data_path
from runbook.machine import git
from runbook.machine.gpu import find_nvidia_smi, visible_gpus
from runbook.machine.gpu.cards import read_nvidia_smi
from runbook.records import RunRecord
from runbook.records.run import PACKAGE

# Under this name the record's environment keeps `code_digest`.
CODE = "code"
# What the packages read beside Python: rules and remedies, tile choices, templates.
_DATA, _CARRIED = (".yaml", ".txt", ".json", ".j2"), "_data"
_NONE = "none"
_SILENT = "nvidia-smi does not say"
_DIGITS = 12
_WORDS = {
    "changes": "changes against the commit (digest)",
    CODE: "code of the packages (digest)",
    PACKAGE: "package under test (digest)",
    "machine": "machine (digest)",
    "gpus": "GPUs (digest)",
    "packages": "packages that training computes with (digest)",
}


def identity() -> dict[str, str]:
    """What has to stay the same for the rows of two parts of a run to be comparable.

    Interpreter, system, torch, the packages below it, commit and the change against it, driver, and
    by digests the code of our packages, the machine and the GPUs that a launch can see.
    """
    checkout = git.find_checkout()
    state = git.read_git(checkout) if checkout else None
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = _NONE
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch,
        "packages": installed_digest()[:_DIGITS],
        "commit": (state.sha if state else None) or _NONE,
        "changes": state.diff_sha256[:_DIGITS] if state else _NONE,
        CODE: code_digest(),
        PACKAGE: package_under_test(),
        "machine": _digest(platform.node()),
        **_gpus(),
    }


def code_digest() -> str:
    """Digest of our packages and the templates as they are read here: of Python and of data.

    A wheel carries templates and configs inside a package, a checkout beside it; configs are told
    by the record.
    """
    folders = list(package_folders().values())
    data = [
        path
        for folder in (*folders, data_path("templates"))
        for path in sorted(folder.rglob("*"))
        if path.suffix in _DATA and _CARRIED not in path.relative_to(folder).parts
    ]
    return _digest("".join([*map(package_digest, folders), *map(sha256_of, data)]))


def package_under_test() -> str:
    """Digest of the trainer's package, as the harness would import it."""
    return package_digest(package_folders()["nsa"])[:_DIGITS]


def refuse_if_unlike(record: RunRecord, now: Mapping[str, str]) -> None:
    """Raise `UsageError` that names every part of `identity` in which this is another machine."""
    differ = [
        f"{_WORDS.get(name, name)}: {record.environment[name]} then, {value} now"
        for name, value in now.items()
        if record.environment.get(name, value) != value
    ]
    if differ:
        problems = [f"{record.run_id} cannot go on, its rows would not be alike: {differ[0]}"]
        raise UsageError([*problems, *differ[1:]], hint="start a new run instead")


def _gpus() -> dict[str, str]:
    """Driver, and the UUIDs of the GPUs that are visible here as one digest."""
    program = find_nvidia_smi()
    if program is None:
        return {"gpus": _NONE, "driver": _NONE}
    smi, _, _ = read_nvidia_smi(program)
    if smi is None or not smi.gpus:
        return {"gpus": _SILENT, "driver": _SILENT}
    # Of instances of a GPU (MIG) only the variable tells which.
    named = os.environ.get(VISIBLE_DEVICES, "")
    seen = visible_gpus(smi.gpus, environment=os.environ)
    uuids = sorted(gpu.uuid for gpu in seen or smi.gpus)
    uuids += [named] if not seen or "MIG-" in named else []
    return {"gpus": _digest("\n".join(uuids)), "driver": smi.driver or _SILENT}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


PACKAGES = ("nsa", "runbook", "phases", "reports")


def package_folders() -> dict[str, Path]:
    """The folder that each of the project's packages is imported from, links resolved."""
    found = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = Path(spec.origin).resolve().parent
    return found
