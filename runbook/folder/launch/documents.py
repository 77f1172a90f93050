"""Small files of a launch: JSON documents, JUnit results, the console, samples, the load."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pydantic import ValidationError

from runbook.files import LARGEST_TABLE_BYTES, read_bytes
from runbook.folder import RESULT_JSON
from runbook.folder.launch.rows import RowSpec
from runbook.folder.launch.shapes import shape_of, shaped
from runbook.records import LaunchResult
from runbook.records.evidence import JUnitCase, JUnitReport

_CONSOLE_HEAD, _CONSOLE_TAIL = 4_000, 4_000
_CONSOLE_COLUMNS = 4_000

GPU_SAMPLES = RowSpec.of(
    "timestamp index utilization_percent memory_used_mib memory_total_mib power_w temperature_c"
    " sm_clock_mhz throttle_reasons pcie_gen pcie_width uuid source other_processes"
    " others",
    text="timestamp throttle_reasons uuid source others",
    filled="index",
    whole="index",
)
RESOURCES = RowSpec.of(
    "mono step rank rss_mib descriptors threads children shm_mib folder_mib free_mib",
    whole="step rank descriptors threads children",
    complete=True,
)


def name_below(path: Path, root: Path) -> str:
    """The path as a record names it: relative to `root` where it lies below."""
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def _document(path: Path, problems: list[str]) -> bytes | None:
    """Its bytes, or None and a problem where there are more than any document has."""
    try:
        return read_bytes(path)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        problems.append(f"{path.name} {error.strerror}")
        return None


def read_json_object(
    path: Path, problems: list[str], *, shape: str = ""
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the JSON object in `path` and its digest; what is wrong is added to `problems`.

    A missing file is `(None, "")` and no problem. What does not fit the named shape is left out.
    """
    if not path.is_file():
        return None, ""
    data = _document(path, problems)
    if data is None:
        return None, ""
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not JSON: {error}")
        return None, sha256
    if not isinstance(document, dict):
        problems.append(f"{path.name} does not hold a JSON object")
        return None, sha256
    if shape:
        document, misfits = shaped(document, shape_of(shape), path.name)
        problems += misfits
    return document, sha256


def json_object(path: Path, *, shape: str = "") -> Mapping[str, Any]:
    """The JSON object in `path` as far as it is there: empty if it cannot be read as one."""
    try:
        return read_json_object(path, [], shape=shape)[0] or {}
    except OSError:
        return {}


def launch_result(folder: Path, problems: list[str]) -> LaunchResult | None:
    """How the launch ended, where a launcher was there; one that cannot be read is a problem."""
    result, _ = read_json_object(folder / RESULT_JSON, problems)
    try:
        return LaunchResult.model_validate(result) if result is not None else None
    except ValidationError:
        problems.append(f"{RESULT_JSON}: is no end of a launch")
        return None


def read_junit(path: Path, *, name: str, problems: list[str]) -> JUnitReport | None:
    """Return every test case of a JUnit file, or None (and a problem) if it cannot be read."""
    if not path.is_file():
        return None
    data = _document(path, problems)
    if data is None:
        return None
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        problems.append(f"{path.name} declares entities and was not read")
        return None
    try:
        root = ElementTree.fromstring(data)  # noqa: S314 - no entities, see above
    except ElementTree.ParseError as error:
        problems.append(f"{path.name} is not XML: {error}")
        return None
    cases = tuple(_case(element) for element in root.iter("testcase"))
    return JUnitReport(path=name, sha256=hashlib.sha256(data).hexdigest(), cases=cases)


def _case(element: ElementTree.Element) -> JUnitCase:
    status, message = "passed", ""
    for tag, meaning in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        found = element.find(tag)
        if found is not None:
            status, message = meaning, found.get("message", "") or (found.text or "").strip()
            break
    properties = {item.get("name", ""): item.get("value", "") for item in element.iter("property")}
    return JUnitCase(
        name=element.get("name", ""),
        classname=element.get("classname", ""),
        status=status,
        message=message,
        properties=properties,
    )


def recorded_toggles(env: Mapping[str, Any]) -> dict[str, Any]:
    """The toggles of env.json by name, with their values as the launch began."""
    return {row.get("name"): row.get("value") for row in env.get("toggles") or ()}


def read_console(path: Path) -> tuple[tuple[str, ...], str]:
    """Return the console's lines and digest; of a very long one, its first and last lines.

    What is in the middle of one of over 256 MiB is not read.
    """
    digest = hashlib.sha256()
    head: list[str] = []
    tail: deque[str] = deque(maxlen=_CONSOLE_TAIL)
    left_out = 0
    with path.open("rb") as stream:
        gap = os.fstat(stream.fileno()).st_size - LARGEST_TABLE_BYTES
        while line := stream.readline(_CONSOLE_COLUMNS):
            if gap > 0 and stream.tell() > LARGEST_TABLE_BYTES // 2:
                stream.seek(gap, os.SEEK_CUR)
                gap = 0
            digest.update(line)
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            if len(head) < _CONSOLE_HEAD:
                head.append(text)
                continue
            left_out += len(tail) == _CONSOLE_TAIL
            tail.append(text)
    middle = [f"... {left_out} lines left out ..."] if left_out else []
    return (*head, *middle, *tail), digest.hexdigest()


_NUMBERS = ("cpus", "total_s", "others_s", "steal_s")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Shares of all CPUs over the launches: of other processes, and of other machines on this host.

    `highest` is the highest load average of a minute, at the start or the end of a launch.
    """

    cpus: int
    others: float
    steal: float
    highest: float

    @property
    def taken(self) -> float:
        """The share of the CPUs that this launch could not have."""
        return self.others + self.steal

    def short_of(self, ranks: int) -> float:
        """CPUs beyond those there are that so many ranks, each with one to itself, would need."""
        return max(0.0, self.taken * self.cpus + ranks - self.cpus)

    def __str__(self) -> str:
        return (
            f"other work took {self.others:.1%} of {self.cpus} CPUs, the host {self.steal:.1%}; "
            f"load average up to {self.highest:.1f}"
        )


def load_of(documents: Iterable[Mapping[str, Any] | None]) -> Load | None:
    """The load over all launches whose document tells it; None where none does."""
    told = [one for one in documents if one is not None and _is_whole(one)]
    total_s = sum(float(one["total_s"]) for one in told)
    if not told or total_s <= 0:
        return None
    both = (one.get(name) for one in told for name in ("load_before", "load_after"))
    loads = [float(minutes[0]) for minutes in both if minutes]
    return Load(
        cpus=int(told[-1]["cpus"]),
        others=sum(float(one["others_s"]) for one in told) / total_s,
        steal=sum(float(one["steal_s"]) for one in told) / total_s,
        highest=max(loads, default=0.0),
    )


def _is_whole(document: Mapping[str, Any]) -> bool:
    return not document.get("problem") and all(
        document.get(name) is not None and document[name] >= 0 for name in _NUMBERS
    )
