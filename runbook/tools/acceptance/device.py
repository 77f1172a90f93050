"""Stage `device`: what nvidia-smi and torch say of this machine, kept as fixtures without names.

    python -m runbook.tools.acceptance.device --out DIR [--stand-in]

Serial numbers and UUIDs become digests of themselves, in their own form, so that what reads the
real ones reads these. The same number becomes the same digest in every file.
"""

from __future__ import annotations

import hashlib
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from runbook.errors import RunbookError
from runbook.files import write_atomic
from runbook.machine.gpu.nvidia_smi import GpuState, NvidiaSmi, parse_nvidia_smi, parse_topology
from runbook.machine.gpu.sampler import query_fields
from runbook.process.start import run_tool
from runbook.read.redact import redact_text
from runbook.tools.acceptance.program import Program, markdown_table

_ASK_S = 40.0
_UUID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")
_SERIAL = re.compile(
    r"(?P<open><(?P<tag>serial|board_id|gpu_part_number|chassis_serial_number|node_guid"
    r"|system_guid|host_id|gpu_guid|module_id|cluster_uuid|pdi)>)(?P<value>[^<]+)(?P<close></)"
)
_NOTHING = ("N/A", "Requested functionality has been deprecated", "")
_PROCESS = re.compile(r"(<process_name>)([^<]*/)?([^</]*)")
_MAC = re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE)

_SMI = "nvidia-smi"


def _asked() -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """File, command, and whether the stage fails without it."""
    fields = ",".join(query_fields(_SMI))
    return (
        ("nvidia_smi.xml", (_SMI, "-q", "-x"), True),
        ("topology.txt", (_SMI, "topo", "-m"), False),
        ("gpu_query.csv", (_SMI, f"--query-gpu={fields}", "--format=csv,noheader,nounits"), True),
        ("query_help.txt", (_SMI, "--help-query-gpu"), False),
        ("nvidia_smi.txt", (_SMI,), False),
        ("collect_env.txt", (sys.executable, "-m", "torch.utils.collect_env"), True),
        ("packages.txt", (sys.executable, "-m", "pip", "list", "--format=freeze"), False),
    )


# What the program reads of a card; one that is empty on this driver is news.
_READ = (
    "name", "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max", "memory_total_mib",
    "memory_used_mib", "performance_state", "ecc_uncorrected_volatile", "remap_pending", "mig",
)  # fmt: skip


def anonymous(text: str, *, host: str = "") -> str:
    """The text without what names this one machine: serials, UUIDs, addresses, paths, its name."""
    text = _UUID.sub(lambda match: _like_uuid(match.group()), text)
    text = _SERIAL.sub(_hashed, text)
    text = _PROCESS.sub(r"\1\3", text)
    text = _MAC.sub("00:00:00:00:00:00", text)
    if len(host) > 2:
        text = re.sub(rf"\b{re.escape(host)}\b", "host", text)
    return redact_text(text)


def _like_uuid(value: str) -> str:
    digest = hashlib.sha256(value.lower().encode()).hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def _hashed(match: re.Match[str]) -> str:
    value = match["value"].strip()
    if value in _NOTHING:
        return match.group()
    return f"{match['open']}{hashlib.sha256(value.encode()).hexdigest()[:13]}{match['close']}"


def unread_fields(gpu: GpuState) -> list[str]:
    """What the program would read of a card and this driver does not say."""
    link = {f"pcie_{name}": value for name, value in gpu.link.items()}
    told = {**vars(gpu), **link, **gpu.counters}
    return [name for name in _READ if told[name] in (None, "")]


def _fields_row(gpu: GpuState) -> tuple[str, str]:
    unread = unread_fields(gpu)
    told = f"{len(_READ) - len(unread)} of {len(_READ)}"
    return f"fields read of GPU {gpu.index}", f"{told}; not {', '.join(unread)}" if unread else told


def main(argv: Sequence[str]) -> int:
    """0 if everything that is needed was told and could be read, 1 if not."""
    program = Program(__doc__)
    args = program.parse(argv)
    host = socket.gethostname()
    rows, problems = [], []
    for name, command, needed in _asked():
        told = run_tool(command, timeout_s=_ASK_S)
        if told.ok:
            write_atomic(args.out / name, anonymous(told.stdout, host=host))
        elif needed and not (args.stand_in and command[0] == _SMI):
            problems.append(f"{name}: {told.problem}")
        rows.append((name, "yes" if told.ok else told.problem))
    found: dict[str, object] = {}
    summary = "no nvidia-smi here: torch's own description only"
    if (args.out / "nvidia_smi.xml").is_file():
        smi, text = _read(args.out, problems)
        summary = text
        found = {"driver": smi.driver, "cuda": smi.cuda} if smi else {}
        rows += [_fields_row(gpu) for gpu in (smi.gpus if smi else ())]
    summary = "; ".join([summary, *problems])
    program.write(summary, markdown_table(("file", "told"), rows), {**found, "problems": problems})
    return 1 if problems else 0


def _read(out: Path, problems: list[str]) -> tuple[NvidiaSmi | None, str]:
    """Read the kept files by what reads the real ones."""
    try:
        smi = parse_nvidia_smi((out / "nvidia_smi.xml").read_text("utf-8"))
    except RunbookError as error:
        problems.append(str(error))
        return None, "nvidia-smi's XML could not be read"
    if not smi.gpus:
        problems.append("nvidia-smi's XML names no GPU")
    topology = out / "topology.txt"
    if topology.is_file():
        parse_topology(topology.read_text("utf-8"))
    names = ", ".join(dict.fromkeys(gpu.name for gpu in smi.gpus))
    return smi, f"{len(smi.gpus)} x {names}, driver {smi.driver}, CUDA {smi.cuda}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
