"""Variables that belong to torch, NCCL and CUDA: recorded, and old spellings translated.

torch 2.13 ignores several names that the seeds set, and breaks on some values. `plan` says what
becomes of each; nothing is dropped or renamed without a note. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

PASSTHROUGH_NAMES: tuple[str, ...] = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_DEBUG",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_DISTRIBUTED_DEBUG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
)

_ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# 3 ends the process and leaves the flight recorder usable; 1 is incompatible with the recorder.
_ASYNC_VALUE = "3"


@dataclass(frozen=True, kw_only=True)
class Passed:
    """One variable as found, the variable and value that torch will read, and why."""

    name: str
    value: str
    mapped_to: str | None
    mapped_value: str | None
    note: str = ""

    def describe(self) -> dict[str, str | None]:
        """The row of env.json."""
        mapped = f"{self.mapped_to}={self.mapped_value}" if self.mapped_to else None
        return {"name": self.name, "value": self.value, "mapped_to": mapped, "note": self.note}


def plan(environ: Mapping[str, str], *, uses_nccl: bool) -> tuple[list[Passed], list[str]]:
    """What becomes of each variable that is set, and what is wrong with them."""
    problems = []
    if "PYTORCH_CUDA_ALLOC_CONF" in environ and "PYTORCH_ALLOC_CONF" in environ:
        problems.append(
            "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set: the first is an alias "
            "of the second in torch 2.13; keep only PYTORCH_ALLOC_CONF"
        )
    rows = [
        _rule(name)(name, environ[name], uses_nccl) for name in PASSTHROUGH_NAMES if name in environ
    ]
    return rows, problems


def changes(rows: list[Passed], environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables to set and the ones to remove so that torch reads what was meant."""
    setting: dict[str, str] = {}
    removing: list[str] = []
    for row in rows:
        if row.mapped_to != row.name:
            removing.append(row.name)
        if row.mapped_to and row.mapped_value and environ.get(row.mapped_to) != row.mapped_value:
            setting[row.mapped_to] = row.mapped_value
    return setting, removing


def _rule(name: str) -> Callable[[str, str, bool], Passed]:
    return _RULES.get(name, _keep)


def _keep(name: str, value: str, _uses_nccl: bool) -> Passed:
    return Passed(name=name, value=value, mapped_to=name, mapped_value=value)


def _async(name: str, value: str, uses_nccl: bool) -> Passed:
    if not uses_nccl or value == "0":
        # Under torchrun the new name is always set, by torchrun itself.
        silent = uses_nccl or name == _ASYNC
        note = "" if silent else "without effect: no NCCL here"
        return Passed(name=name, value=value, mapped_to=_ASYNC, mapped_value=value, note=note)
    return Passed(
        name=name,
        value=value,
        mapped_to=_ASYNC,
        mapped_value=_ASYNC_VALUE,
        note="torchrun forces 1, with which the flight recorder does not work: 3 is used",
    )


def _blocking(name: str, value: str, _uses_nccl: bool) -> Passed:
    if value == "0":
        return Passed(
            name=name, value=value, mapped_to="TORCH_NCCL_BLOCKING_WAIT", mapped_value="0"
        )
    return Passed(
        name=name,
        value=value,
        mapped_to=None,
        mapped_value=None,
        note="dropped: with it there is no NCCL watchdog thread and no flight-recorder dump",
    )


def _alloc(name: str, value: str, _uses_nccl: bool) -> Passed:
    return Passed(
        name=name,
        value=value,
        mapped_to="PYTORCH_ALLOC_CONF",
        mapped_value=value,
        note="the name that torch 2.13 reads",
    )


def _debug(name: str, value: str, uses_nccl: bool) -> Passed:
    if value.upper() != "DETAIL":
        return _keep(name, value, uses_nccl)
    if uses_nccl:
        note = "slows small collectives 3 to 9 times: for diagnosis only"
        return Passed(name=name, value=value, mapped_to=name, mapped_value=value, note=note)
    return Passed(
        name=name,
        value=value,
        mapped_to=name,
        mapped_value="INFO",
        note="DETAIL crashes DDP on gloo: INFO is used",
    )


_RULES: dict[str, Callable[[str, str, bool], Passed]] = {
    "NCCL_ASYNC_ERROR_HANDLING": _async,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _async,
    "NCCL_BLOCKING_WAIT": _blocking,
    "TORCH_NCCL_BLOCKING_WAIT": _blocking,
    "PYTORCH_CUDA_ALLOC_CONF": _alloc,
    "TORCH_DISTRIBUTED_DEBUG": _debug,
}
