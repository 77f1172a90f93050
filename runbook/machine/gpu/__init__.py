"""What the GPUs are and count, by the XML of `nvidia-smi -q -x`; what they do, by NVML."""

from __future__ import annotations

import shutil


def find_nvidia_smi() -> str | None:
    """The program, None where there is none."""
    return shutil.which("nvidia-smi")
