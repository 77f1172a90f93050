"""What `nvidia-smi topo -m` prints."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rehearsal.hardware import NOT_AVAILABLE, Gpu

_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def topology(gpus: Sequence[Gpu], link: str) -> str:
    """The matrix of `nvidia-smi topo -m`; its header is underlined by escape codes."""
    names = [f"GPU{gpu.index}" for gpu in gpus]
    tail = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\t\x1b[4m" + "\t".join([*names, *tail]) + "\x1b[0m"]
    for row in names:
        cells = [" X " if row == column else link for column in names]
        lines.append("\t".join([row, *cells, "0-15", "0", NOT_AVAILABLE]))
    return "\n".join(lines) + "\n" + _LEGEND
