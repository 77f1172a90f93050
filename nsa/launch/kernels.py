"""Which kernels run the dense parts, and what this machine lacks for them. Torch-free."""

from __future__ import annotations

import importlib.util
import shutil

from nsa.toggles import NEEDS_CUDA, ToggleSet

LIGER, TRITON = "liger_kernel", "triton"
_COMPILERS = ("g++", "clang++", "c++")


def other_kernels(toggles: ToggleSet) -> bool:
    """Do the dense parts run otherwise than by our own modules?"""
    return toggles.text("NSA_COMPILE") != "off" or toggles.flag("NSA_LIGER")


def triton_asked(toggles: ToggleSet, by_config: bool) -> str:
    """1, 0 or auto: are the package's Triton kernels wanted? by_config: its value."""
    given = toggles.values["NSA_USE_TRITON_SEL"]
    return str(int(by_config)) if given is None else str(given)


def why_no_triton(asked: str, device: str) -> str | None:
    """Why the kernels that are asked for by name cannot run, with the remedy, or None."""
    if asked != "1":
        return None
    name = "NSA_USE_TRITON_SEL=1 / runtime.use_triton_sel"
    if device == "cpu":
        why = NEEDS_CUDA["NSA_USE_TRITON_SEL=1"]
        return f"{name}: {why}, this is cpu; set it to 0 or auto"
    if device == "cuda" and importlib.util.find_spec(TRITON) is None:
        return f"{name}: the package triton is not installed; set it to 0 or auto"
    return None


def why_not(toggles: ToggleSet, device: str) -> str | None:
    """Why the layers cannot run as asked, with the remedy, or None.

    device: cuda, cpu, or auto while that is not known yet.
    """
    if toggles.flag("NSA_CUDA_GRAPHS") and device == "cpu":
        return f"NSA_CUDA_GRAPHS=1: {NEEDS_CUDA['NSA_CUDA_GRAPHS=1']}, this is cpu; set it to 0"
    if toggles.flag("NSA_LIGER"):
        return _why_no_liger(device)
    mode = toggles.text("NSA_COMPILE")
    if mode == "off":
        return None
    if mode == "graphs" and device == "cpu":
        return f"NSA_COMPILE={mode}: {NEEDS_CUDA['NSA_COMPILE=graphs']}, this is cpu; use dense"
    if device == "cuda" and importlib.util.find_spec(TRITON) is None:
        return "NSA_COMPILE: the package triton is not installed, which compiles for CUDA; use off"
    if device == "cpu" and not any(map(shutil.which, _COMPILERS)):
        return (
            f"NSA_COMPILE: no C++ compiler here ({', '.join(_COMPILERS)}); install one or use off"
        )
    return None


def _why_no_liger(device: str) -> str | None:
    if device == "cpu":
        return f"NSA_LIGER=1: {NEEDS_CUDA['NSA_LIGER=1']}, this is cpu; set it to 0"
    if importlib.util.find_spec(LIGER) is None:
        return (
            "NSA_LIGER=1: the package liger-kernel is not installed; "
            "pip install 'nsa-runbook[liger]', or set it to 0"
        )
    return None
