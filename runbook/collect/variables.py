"""Environment variables checked before anything starts: wrong names, wrong values, no effect."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from nsa import torch_env
from nsa.toggles import TOGGLES, ToggleSet, contradictions, read_values
from runbook.errors import did_you_mean

__all__ = ["environment_notes", "environment_problems", "torch_variables"]

_HEADERS = "include/torch/csrc/distributed/c10d"
_FAMILY = re.compile(r"\bTORCH_(?:NCCL|FR)_[A-Z0-9_]+\b")
_FAMILY_PREFIXES = ("TORCH_NCCL_", "TORCH_FR_")


def torch_variables(torch_home: Path | None = None) -> frozenset[str]:
    """The TORCH_NCCL_* and TORCH_FR_* names that the installed torch reads, from its headers.

    Empty if torch is missing or ships none. Does not import torch.
    """
    if torch_home is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return frozenset()
        torch_home = Path(spec.origin).parent
    names: set[str] = set()
    for header in sorted((torch_home / _HEADERS).glob("*.hpp")):
        names.update(_FAMILY.findall(header.read_text(encoding="utf-8", errors="replace")))
    return frozenset(names)


def environment_problems(environ: Mapping[str, str], *, uses_nccl: bool) -> list[str]:
    """Everything that is wrong with the variables: unknown, not allowed, contradicting."""
    values, problems = read_values(environ)
    merged = {name: values.get(name, row.default) for name, row in TOGGLES.items()}
    chosen = ToggleSet(values=merged, sources=dict.fromkeys(values, "environment"))
    problems = [*problems, *contradictions(chosen)]
    problems += torch_env.plan(environ, uses_nccl=uses_nccl)[1]
    read = torch_variables()
    known = {*read, *torch_env.TORCH_VARIABLES}
    problems += [
        f"{name}: the installed torch reads no such variable{did_you_mean(name, known)}"
        for name in sorted(environ)
        if read and name.startswith(_FAMILY_PREFIXES) and name not in known
    ]
    return problems


def environment_notes(environ: Mapping[str, str], *, uses_nccl: bool) -> list[str]:
    """What becomes of variables that are set under an old name or to a harmful value."""
    rows, _ = torch_env.plan(environ, uses_nccl=uses_nccl)
    return [f"{row.name}={row.value}: {row.note}" for row in rows if row.note]
