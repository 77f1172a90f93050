"""Read `nvidia-smi -q -x` and `nvidia-smi topo -m`: links, memory, processes, health."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass

from runbook.collect.probe import run_tool
from runbook.errors import RunbookError

_TIMEOUT_S = 20.0
_MISSING = frozenset({"", "N/A", "[N/A]", "Not Supported", "Unknown Error", "None"})
# Reasons that slow a GPU down in a way that makes its timings worthless; being idle is not one.
_THROTTLES = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "software thermal slowdown",
}
# Limits that somebody set or that the card keeps to by design, under load too: told, no fault.
_CAPS = {
    "sw_power_cap": "power cap",
    "applications_clocks_setting": "applications clocks set",
}
_IDLE_STATES = frozenset({"P8", "P9", "P10", "P11", "P12", "P15"})


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that has a context on a GPU. `kind` is C (compute), G (graphics) or C+G."""

    pid: int
    kind: str
    name: str
    used_mib: float | None


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU as nvidia-smi describes it; None where it says nothing.

    `pcie_gen_max` is the most that GPU and slot can do together.
    """

    index: int
    uuid: str
    name: str
    pcie_gen: int | None
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    memory_total_mib: float | None
    memory_used_mib: float | None
    performance_state: str | None
    throttle: tuple[str, ...]
    caps: tuple[str, ...]
    ecc_uncorrected: int | None
    remap_pending: bool | None
    remap_failure: bool | None
    mig: bool | None
    power_limit_w: float | None
    power_default_w: float | None
    processes: tuple[GpuProcess, ...]

    @property
    def compute_processes(self) -> tuple[GpuProcess, ...]:
        """Processes that compute; a desktop's graphics alone do not make a GPU busy."""
        return tuple(process for process in self.processes if "C" in process.kind)

    @property
    def link_idle(self) -> bool:
        """True if the link runs below its best only because the GPU rests."""
        below = (
            self.pcie_gen is not None
            and self.pcie_gen_max is not None
            and self.pcie_gen < self.pcie_gen_max
        )
        return below and self.performance_state in _IDLE_STATES


@dataclass(frozen=True, kw_only=True)
class NvidiaSmi:
    """All GPUs of a machine, in nvidia-smi's order."""

    driver: str | None
    cuda: str | None
    gpus: tuple[GpuState, ...]


def ask_nvidia_smi(program: str) -> tuple[NvidiaSmi | None, str]:
    """What `nvidia-smi -q -x` tells now; None and the reason where it does not answer."""
    answer = run_tool([program, "-q", "-x"], timeout_s=_TIMEOUT_S)
    if not answer.ok:
        return None, answer.problem
    try:
        return parse_nvidia_smi(answer.stdout), ""
    except RunbookError as error:
        return None, str(error)


def parse_nvidia_smi(xml_text: str) -> NvidiaSmi:
    """Read the XML of `nvidia-smi -q -x`.

    Elements that a driver version lacks are None. Raises RunbookError if it is no such document.
    """
    root = read_xml(xml_text)
    return NvidiaSmi(
        driver=_text(root, "driver_version"),
        cuda=_text(root, "cuda_version"),
        gpus=tuple(_gpu(index, node) for index, node in enumerate(root.findall("gpu"))),
    )


def read_xml(xml_text: str) -> ET.Element:
    """The document of `nvidia-smi -q -x`. Raises RunbookError if it is none."""
    try:
        # expat loads no external entities and bounds the expansion of internal ones.
        root = ET.fromstring(xml_text)  # noqa: S314
    except ET.ParseError as error:
        raise RunbookError(f"nvidia-smi's XML cannot be read: {error}") from error
    if root.tag != "nvidia_smi_log":
        raise RunbookError(f"expected <nvidia_smi_log> from nvidia-smi -q -x, got <{root.tag}>")
    return root


def _gpu(index: int, node: ET.Element) -> GpuState:
    link = "pci/pci_gpu_link_info/"
    return GpuState(
        index=index,
        uuid=_text(node, "uuid") or "",
        name=_text(node, "product_name") or "",
        pcie_gen=_whole(node, f"{link}pcie_gen/current_link_gen"),
        pcie_gen_max=_whole(node, f"{link}pcie_gen/max_link_gen"),
        pcie_width=_whole(node, f"{link}link_widths/current_link_width"),
        pcie_width_max=_whole(node, f"{link}link_widths/max_link_width"),
        memory_total_mib=_number(node, "fb_memory_usage/total"),
        memory_used_mib=_number(node, "fb_memory_usage/used"),
        performance_state=_text(node, "performance_state"),
        throttle=_clock_reasons(node, _THROTTLES),
        caps=_clock_reasons(node, _CAPS),
        ecc_uncorrected=_ecc_uncorrected(node),
        remap_pending=_says(node, "remapped_rows/remapped_row_pending", "Yes"),
        remap_failure=_says(node, "remapped_rows/remapped_row_failure", "Yes"),
        mig=_mig(node),
        power_limit_w=read_power(node)[0],
        power_default_w=read_power(node)[1],
        processes=tuple(_process(item) for item in node.findall("processes/process_info")),
    )


def _process(node: ET.Element) -> GpuProcess:
    return GpuProcess(
        pid=_whole(node, "pid") or 0,
        kind=_text(node, "type") or "",
        name=_text(node, "process_name") or "",
        used_mib=_number(node, "used_memory"),
    )


def _mig(node: ET.Element) -> bool | None:
    """Is the GPU cut into instances? One that cannot be says N/A."""
    mode = (node.findtext("mig_mode/current_mig") or "").strip()
    return None if not mode else mode == "Enabled"


def read_power(node: ET.Element) -> tuple[float | None, float | None]:
    """The power limit in force and the one that the card is sold with, W; None where untold.

    The element was `power_readings` up to driver 530.
    """
    new, old = "gpu_power_readings/", "power_readings/"
    limit = _first(node, f"{new}current_power_limit", f"{old}power_limit")
    return limit, _first(node, f"{new}default_power_limit", f"{old}default_power_limit")


def _first(node: ET.Element, *paths: str) -> float | None:
    known = (number for path in paths if (number := _number(node, path)) is not None)
    return next(known, None)


def _clock_reasons(node: ET.Element, reasons: Mapping[str, str]) -> tuple[str, ...]:
    # The element was renamed from "throttle" to "event" with driver 535.
    found = []
    for kind in ("event", "throttle"):
        for key, words in reasons.items():
            if _text(node, f"clocks_{kind}_reasons/clocks_{kind}_reason_{key}") == "Active":
                found.append(words)
    return tuple(found)


def _ecc_uncorrected(node: ET.Element) -> int | None:
    volatile = node.find("ecc_errors/volatile")
    if volatile is None:
        return None
    counts = [
        _leading_int(child.text)
        for child in volatile.iter()
        if "uncorrectable" in child.tag and not len(child)
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _text(node: ET.Element, path: str) -> str | None:
    text = (node.findtext(path) or "").strip()
    return None if text in _MISSING else text


def _number(node: ET.Element, path: str) -> float | None:
    match = re.match(r"[-+]?\d+(?:\.\d+)?", _text(node, path) or "")
    return float(match.group()) if match else None


def _whole(node: ET.Element, path: str) -> int | None:
    return _leading_int(_text(node, path))


def _leading_int(text: str | None) -> int | None:
    match = re.match(r"\d+", (text or "").strip())
    return int(match.group()) if match else None


def _says(node: ET.Element, path: str, word: str) -> bool | None:
    text = _text(node, path)
    return None if text is None else text == word


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read the matrix of `nvidia-smi topo -m`: how each pair of GPUs is connected.

    Returns {(0, 1): "NODE"} or "NV12", "PIX", "PHB", "SYS"; each pair once, lower index first.
    """
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((cells for cells in lines if cells and cells[0] == "GPU0"), [])
    columns = [cell for cell in header if re.fullmatch(r"GPU\d+", cell)]
    links: dict[tuple[int, int], str] = {}
    for cells in lines:
        if not cells or cells is header or not re.fullmatch(r"GPU\d+", cells[0]):
            continue
        row = int(cells[0][3:])
        # strict=False: affinity columns follow the links.
        for column, link in zip(columns, cells[1:], strict=False):
            if (other := int(column[3:])) > row:
                links[(row, other)] = link
    return links
