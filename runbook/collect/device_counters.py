"""The counters of every GPU from the XML of `nvidia-smi -q -x`: the form of NVML's, from a tool.

The element names are those of the documented nvsmi_device DTDs (v11 to v13). What the XML does not
hold, and what a card says is not supported, is None with its reason in `missing`.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from typing import Any

from runbook.collect.nvidia import read_power, read_xml
from runbook.folder.shapes import POWER_FIELDS

_NOT_IN_XML = "nvidia-smi's XML does not tell"
_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
_RETIRED = "retired_pages/"


def counters_of_xml(xml_text: str) -> dict[str, Any]:
    """Driver and GPUs as in `devices_before.json`. Raises RunbookError if it is no such XML."""
    root = read_xml(xml_text)
    gpus = [_gpu(index, node) for index, node in enumerate(root.findall("gpu"))]
    return {"driver": (root.findtext("driver_version") or "").strip(), "gpus": gpus}


def _gpu(index: int, node: ET.Element) -> dict[str, Any]:
    link = "pci/pci_gpu_link_info/"
    found = {
        "ecc_corrected_volatile": _ecc(node, "volatile", corrected=True),
        "ecc_uncorrected_volatile": _ecc(node, "volatile", corrected=False),
        "ecc_corrected_aggregate": _ecc(node, "aggregate", corrected=True),
        "ecc_uncorrected_aggregate": _ecc(node, "aggregate", corrected=False),
        "remapped_correctable": _whole(node, "remapped_rows/remapped_row_corr"),
        "remapped_uncorrectable": _whole(node, "remapped_rows/remapped_row_unc"),
        "remap_pending": _flag(node, ("remapped_rows/remapped_row_pending",)),
        "remap_failure": _flag(node, ("remapped_rows/remapped_row_failure",)),
        "retired_single_bit": _whole(
            node, f"{_RETIRED}multiple_single_bit_retirement/retired_count"
        ),
        "retired_double_bit": _whole(node, f"{_RETIRED}double_bit_retirement/retired_count"),
        "retired_pending": _flag(
            node, (f"{_RETIRED}pending_retirement", f"{_RETIRED}pending_blacklist")
        ),
        "pcie_replays": _whole(node, "pci/replay_counter"),
        "power_violation_s": None,
        "thermal_violation_s": None,
    }
    mode = (node.findtext("mig_mode/current_mig") or "").strip()
    return {
        "index": index,
        "uuid": (node.findtext("uuid") or "").strip(),
        "name": (node.findtext("product_name") or "").strip() or None,
        "pci": (node.findtext("pci/pci_bus_id") or node.get("id") or "").strip() or None,
        "mig": mode == "Enabled" if mode else None,
        "counters": found,
        "link": {
            "gen": _whole(node, f"{link}pcie_gen/current_link_gen"),
            "gen_max": _whole(node, f"{link}pcie_gen/max_link_gen"),
            "width": _whole(node, f"{link}link_widths/current_link_width"),
            "width_max": _whole(node, f"{link}link_widths/max_link_width"),
        },
        "power": dict(zip(POWER_FIELDS, read_power(node), strict=True)),
        "sm_max_mhz": _whole(node, "max_clocks/sm_clock"),
        "clock_events": _clock_events(node),
        "missing": {name: _NOT_IN_XML for name, value in found.items() if value is None},
    }


def _ecc(node: ET.Element, span: str, *, corrected: bool) -> int | None:
    """All errors of a kind: since Ampere by memory, before that a total of one or two bits."""
    section = node.find(f"ecc_errors/{span}")
    if section is None:
        return None
    old = section.findtext("single_bit/total" if corrected else "double_bit/total")
    if old is not None:
        return _leading(old)
    leaves = (child for child in section.iter() if not len(child) and "correctable" in child.tag)
    return _sum(child.text for child in leaves if ("uncorrectable" not in child.tag) is corrected)


def _sum(texts: Iterable[str | None]) -> int | None:
    known = [number for text in texts if (number := _leading(text)) is not None]
    return sum(known) if known else None


def _clock_events(node: ET.Element) -> int | None:
    """The bits that NVML would give, whichever of the two names this driver uses."""
    for kind in ("event", "throttle"):
        section = node.find(f"clocks_{kind}_reasons")
        if section is not None:
            prefix = f"clocks_{kind}_reason_"
            active = (bit for name, bit in _BITS.items() if _active(section, f"{prefix}{name}"))
            return sum(active)
    return None


def _active(section: ET.Element, name: str) -> bool:
    return (section.findtext(name) or "").strip() == "Active"


def _flag(node: ET.Element, paths: Iterable[str]) -> int | None:
    words = [(node.findtext(path) or "").strip() for path in paths]
    return next((int(word == "Yes") for word in words if word in ("Yes", "No")), None)


def _whole(node: ET.Element, path: str) -> int | None:
    return _leading(node.findtext(path))


def _leading(text: str | None) -> int | None:
    match = re.match(r"\d+", (text or "").strip())
    return int(match.group()) if match else None
