"""The GPUs as nvidia-smi tells of them, and what they count before and after each launch.

Here is the one reader of `nvidia-smi -q -x`, in the forms that its versions have, and of `topo -m`.
The element names are those of the documented nvsmi_device DTDs (v11 to v13). What the XML does not
hold, and what a card says is not supported, is None. The documents of a launch tell of errors,
links and what slowed the GPUs; the XML is kept beside them. NVML gives the samples.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.torch_env import VISIBLE_DEVICES
from runbook.errors import RunbookError, without_colors
from runbook.files import utc_text, write_document
from runbook.folder import (
    DEVICES_AFTER_JSON,
    DEVICES_BEFORE_JSON,
    GPU_SAMPLER_TXT,
    GPU_SAMPLES_CSV,
    NVIDIA_SMI_AFTER_XML,
    NVIDIA_SMI_BEFORE_XML,
)
from runbook.folder.facts import redact_text
from runbook.folder.launch.documents import GPU_SAMPLES
from runbook.machine.gpu import BITS, find_nvidia_smi, visible_gpus
from runbook.machine.kernel_log import slot_of
from runbook.process import run_tool, start

_WITHIN_S, _HURRIED_S = 20.0, 2.0
_NOT_IN_XML = "nvidia-smi's XML does not tell"
_MISSING = frozenset({"", "N/A", "[N/A]", "Not Supported", "Unknown Error", "None"})
# Told of a machine, and not before and after each launch.
_NOT_COUNTED = ("memory_total_mib", "memory_used_mib", "processes")


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

    `index` is its place in nvidia-smi's order, `uuid` is empty if unknown; `mig`: it is cut into
    instances.
    `link` has the PCIe generation and width, now and the most that GPU and slot can do together;
    `counters`, `power` and `clock_events` are those of `devices_before.json`.
    """

    index: int
    uuid: str
    mig: bool | None
    name: str
    pci: str | None
    link: Mapping[str, int | None]
    power: Mapping[str, float | None]
    counters: Mapping[str, float | None]
    clock_events: int | None
    sm_max_mhz: int | None
    memory_total_mib: float | None
    memory_used_mib: float | None
    processes: tuple[GpuProcess, ...]

    def held_back_by(self, reasons: Mapping[str, str]) -> list[str]:
        """Those of the reasons that hold its clocks back now, in words."""
        bits = self.clock_events or 0
        return [words for name, words in reasons.items() if bits & BITS[name]]


@dataclass(frozen=True, kw_only=True)
class NvidiaSmi:
    """All GPUs of a machine, in nvidia-smi's order."""

    driver: str | None
    cuda: str | None
    gpus: tuple[GpuState, ...]


def read_nvidia_smi(
    program: str, *, within_s: float = _WITHIN_S
) -> tuple[NvidiaSmi | None, str, str]:
    """What it tells now, None if that cannot be read; its XML as it is; and what is wrong."""
    answer = run_tool([program, "-q", "-x"], timeout_s=within_s)
    if not answer.ok:
        return None, answer.stdout, answer.problem
    try:
        return parse_nvidia_smi(answer.stdout), answer.stdout, ""
    except RunbookError as error:
        return None, answer.stdout, str(error)


def parse_nvidia_smi(xml_text: str) -> NvidiaSmi:
    """Read the XML of `nvidia-smi -q -x`.

    Elements that a driver version lacks are None. Raises RunbookError if it is no such document.
    """
    try:
        # expat loads no external entities and bounds the expansion of internal ones.
        root = ET.fromstring(xml_text)  # noqa: S314
    except ET.ParseError as error:
        raise RunbookError(f"nvidia-smi's XML cannot be read: {error}") from error
    if root.tag != "nvidia_smi_log":
        raise RunbookError(f"expected <nvidia_smi_log> from nvidia-smi -q -x, got <{root.tag}>")
    return NvidiaSmi(
        driver=_text(root, "driver_version"),
        cuda=_text(root, "cuda_version"),
        gpus=tuple(_gpu(index, node) for index, node in enumerate(root.findall("gpu"))),
    )


def _gpu(index: int, node: ET.Element) -> GpuState:
    link = "pci/pci_gpu_link_info/"
    # An element was `power_readings` up to driver 530.
    limits = (("current_power_limit", "power_limit"), ("default_power_limit",) * 2)
    power = (
        _number(node, f"gpu_power_readings/{new}", f"power_readings/{old}") for new, old in limits
    )
    mode = (node.findtext("mig_mode/current_mig") or "").strip()
    return GpuState(
        index=index,
        uuid=_text(node, "uuid") or "",
        name=_text(node, "product_name") or "",
        pci=_text(node, "pci/pci_bus_id") or (node.get("id") or "").strip() or None,
        mig=mode == "Enabled" if mode else None,
        link={
            "gen": _whole(node, f"{link}pcie_gen/current_link_gen"),
            "gen_max": _whole(node, f"{link}pcie_gen/max_link_gen"),
            "width": _whole(node, f"{link}link_widths/current_link_width"),
            "width_max": _whole(node, f"{link}link_widths/max_link_width"),
        },
        power=dict(zip(("limit_w", "default_w"), power, strict=True)),
        counters=_counters(node),
        clock_events=_clock_events(node),
        sm_max_mhz=_whole(node, "max_clocks/sm_clock"),
        memory_total_mib=_number(node, "fb_memory_usage/total"),
        memory_used_mib=_number(node, "fb_memory_usage/used"),
        processes=tuple(_process(item) for item in node.findall("processes/process_info")),
    )


def _counters(node: ET.Element) -> dict[str, float | None]:
    remapped = "remapped_rows/remapped_row_"
    return {
        "ecc_corrected_volatile": _ecc(node, "volatile", corrected=True),
        "ecc_uncorrected_volatile": _ecc(node, "volatile", corrected=False),
        "ecc_corrected_aggregate": _ecc(node, "aggregate", corrected=True),
        "ecc_uncorrected_aggregate": _ecc(node, "aggregate", corrected=False),
        "remapped_correctable": _whole(node, f"{remapped}corr"),
        "remapped_uncorrectable": _whole(node, f"{remapped}unc"),
        "remap_pending": _flag(node, f"{remapped}pending"),
        "remap_failure": _flag(node, f"{remapped}failure"),
        "pcie_replays": _whole(node, "pci/replay_counter"),
        "power_violation_s": _held_back_s(node, "sw_power_cap"),
        "thermal_violation_s": _held_back_s(node, "sw_therm_slowdown", "hw_therm_slowdown"),
    }


def counted(gpu: GpuState) -> dict[str, Any]:
    """A GPU in the form of `devices_before.json`, with what is not told of it."""
    missing = {name: _NOT_IN_XML for name, value in gpu.counters.items() if value is None}
    told = {name: value for name, value in asdict(gpu).items() if name not in _NOT_COUNTED}
    return {**told, "name": gpu.name or None, "missing": missing}


def _process(node: ET.Element) -> GpuProcess:
    return GpuProcess(
        pid=_whole(node, "pid") or 0,
        kind=_text(node, "type") or "",
        name=_text(node, "process_name") or "",
        used_mib=_number(node, "used_memory"),
    )


def _ecc(node: ET.Element, span: str, *, corrected: bool) -> int | None:
    """All errors of a kind, of every memory."""
    section = node.find(f"ecc_errors/{span}")
    if section is None:
        return None
    leaves = (child for child in section.iter() if not len(child) and "correctable" in child.tag)
    asked = (child for child in leaves if ("uncorrectable" not in child.tag) is corrected)
    known = [number for child in asked if (number := _whole(child, ".")) is not None]
    return sum(known) if known else None


def _clock_events(node: ET.Element) -> int | None:
    """The bits that NVML would give, by whichever of the two names this driver uses (535)."""
    for kind in ("event", "throttle"):
        section = node.find(f"clocks_{kind}_reasons")
        if section is not None:
            prefix = f"clocks_{kind}_reason_"
            return sum(b for name, b in BITS.items() if _text(section, prefix + name) == "Active")
    return None


def _held_back_s(node: ET.Element, *reasons: str) -> float | None:
    """Seconds of reduced clocks, which drivers from 570 on count in microseconds."""
    prefix = "clocks_event_reasons_counters"
    told = [_number(node, f"{prefix}/{prefix}_{reason}") for reason in reasons]
    return None if None in told else sum(us for us in told if us is not None) / 1e6


def _flag(node: ET.Element, path: str) -> int | None:
    return {"Yes": 1, "No": 0}.get(_text(node, path) or "")


def _text(node: ET.Element, path: str) -> str | None:
    text = (node.findtext(path) or "").strip()
    return None if text in _MISSING else text


def _number(node: ET.Element, *paths: str) -> float | None:
    """The number that the first of these elements begins with that has one."""
    found = (re.match(r"[-+]?\d+(?:\.\d+)?", _text(node, path) or "") for path in paths)
    return next((float(match.group()) for match in found if match), None)


def _whole(node: ET.Element, path: str) -> int | None:
    match = re.match(r"\d+", _text(node, path) or "")
    return int(match.group()) if match else None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read the matrix of `nvidia-smi topo -m`: how each pair of GPUs is connected.

    Returns {(0, 1): "NODE"} or "NV12", "PIX", "PHB", "SYS"; each pair once, lower index first.
    """
    lines = [line.split() for line in without_colors(text).splitlines()]
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


# Not isolated: pynvml may be a wheel carried on PYTHONPATH. The script's own folder stays off it.
SAMPLER = (sys.executable, "-P", str(Path(__file__).with_name("nvml.py")))
# What pynvml loads. Where the loader does not find it, no process has to be started to know that.
LIBRARY = "libnvidia-ml.so.1"
_PCI_DEVICES = Path("/sys/bus/pci/devices")


# The document of a launch, and the XML that it was read from.
BEFORE = DEVICES_BEFORE_JSON, NVIDIA_SMI_BEFORE_XML
AFTER = DEVICES_AFTER_JSON, NVIDIA_SMI_AFTER_XML


def write_devices(
    run_dir: Path, when: tuple[str, str], environment: Mapping[str, str], *, hurry: bool = False
) -> tuple[str, ...]:
    """Ask about the GPUs that a launch in `environment` may use, and write what they answer.

    Returns their PCI places, and those of the bridges above them.
    Without a driver the document says so and holds no GPU. In a `hurry`, because somebody waits
    for an interrupted run to end, the answer has to come within two seconds.
    Raises OSError if the disk refuses.
    """
    name, xml_name = when
    tool = find_nvidia_smi()
    smi, xml, problem = None, "", "no nvidia-smi"
    if tool is not None:
        smi, xml, problem = read_nvidia_smi(tool, within_s=_HURRIED_S if hurry else _WITHIN_S)
    if xml:
        (run_dir / xml_name).write_text(redact_text(xml), encoding="utf-8")
    shown = visible_gpus(smi.gpus, environment=environment) if smi else ()
    gpus = [counted(gpu) for gpu in shown]
    for gpu in gpus:
        gpu["pci_path"] = _path_to(gpu["pci"])
    document = {
        "source": "nvidia-smi" if smi else "",
        "problem": problem,
        "taken_at": utc_text(),
        "driver": smi.driver or "" if smi else "",
        "visible": environment.get(VISIBLE_DEVICES),
        "gpus": gpus,
    }
    write_document(run_dir / name, document)
    placed = [gpu for gpu in gpus if gpu["pci"]]
    slots = [slot for gpu in placed for slot in (slot_of(gpu["pci"]), *gpu["pci_path"])]
    return tuple(dict.fromkeys(slots))


def _path_to(pci: str | None, root: Path = _PCI_DEVICES) -> list[str]:
    """The bridges above a device, from the root; their errors are those of its link."""
    if not pci:
        return []
    place = root / f"{slot_of(pci)}.0"
    if not place.exists():
        return []
    parts = place.resolve().parts
    above = [part for part in parts[:-1] if part.count(":") == 2 and "." in part]
    return [slot_of(part) for part in above]


# The steps of a fast trainer are over in seconds.
_EVERY_MS = 200
_ENDED_WITHIN_S = 2.0


@contextmanager
def gpu_samples(run_dir: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Write `gpu_samples.csv` five times a second, where NVML is installed.

    The sampler carries the token of the launch's `environment`, so it cannot be left over. Rows
    stay; what it says of a card that it lost goes into a file beside them.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        yield
        return
    path = run_dir / GPU_SAMPLES_CSV
    with path.open("wb") as stream:
        stream.write((",".join(GPU_SAMPLES.columns) + "\n").encode())
        stream.flush()
        process = start(
            [*SAMPLER, str(_EVERY_MS)], environment, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.kill()
        # One that hangs in the driver of a lost card cannot be killed before that lets it go.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_ENDED_WITHIN_S)
        head, *lines = path.read_text("utf-8", "replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        rows = [line for line in whole if line.count(",") == len(GPU_SAMPLES.columns) - 1]
        path.write_text(head + "".join(rows), encoding="utf-8")
        if said := [line for line in whole if line not in rows]:
            path.with_name(GPU_SAMPLER_TXT).write_text("".join(said), encoding="utf-8")
