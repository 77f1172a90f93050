"""Variables that belong to torch, NCCL and CUDA: recorded, and old spellings translated.

torch 2.13 ignores several names that people set, and breaks on some values (E11 to E14). `plan`
says what becomes of each; nothing is dropped or renamed without a note. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_ALLOC = "PYTORCH_ALLOC_CONF"
_OLD_ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

TORCH_VARIABLES: tuple[str, ...] = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_DEBUG",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    _ASYNC,
    _BLOCKING,
    _DEBUG,
    _OLD_ALLOC,
    _ALLOC,
    VISIBLE_DEVICES,
)


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
    if _OLD_ALLOC in environ and _ALLOC in environ:
        problems.append(
            f"{_OLD_ALLOC} and {_ALLOC} are both set: the first is an alias of the second in "
            f"torch 2.13; keep only {_ALLOC}"
        )
    rows = []
    for name in TORCH_VARIABLES:
        if name in environ:
            value = environ[name]
            to, mapped, note = _RULES.get(name, _keep)(name, value, uses_nccl)
            rows.append(
                Passed(name=name, value=value, mapped_to=to, mapped_value=mapped, note=note)
            )
    return rows, problems


def flight_dumps(prefix: str, *, torch_version: str) -> dict[str, str]:
    """Variables by which NCCL's watchdog dumps the last collectives to `prefix` + rank.

    Without a prefix the dumps go to ~/.cache/torch. torch 2.10 has names of its own for them and
    warns of those that older ones read.
    """
    old, new = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    old_file, new_file = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    renamed = (major, minor) >= (2, 10)
    return {
        new if renamed else old: "2000",
        new_file if renamed else old_file: prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


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


# Each rule: name, value, whether NCCL is in use -> name and value that torch will read, and why.
Mapped = tuple[str | None, str | None, str]


def _keep(name: str, value: str, _uses_nccl: bool) -> Mapped:
    return name, value, ""


def _async(name: str, value: str, uses_nccl: bool) -> Mapped:
    if not uses_nccl or value == "0":
        # Under torchrun the new name is always set, by torchrun itself.
        silent = uses_nccl or name == _ASYNC
        return _ASYNC, value, "" if silent else "without effect: no NCCL here"
    # 3 ends the process and leaves the flight recorder usable; 1 is incompatible with it.
    why = "torchrun forces 1, with which the flight recorder does not work: 3 is used"
    return _ASYNC, "3", why


def _blocking(_name: str, value: str, _uses_nccl: bool) -> Mapped:
    if value == "0":
        return _BLOCKING, "0", ""
    why = "dropped: with it there is no NCCL watchdog thread and no flight-recorder dump"
    return None, None, why


def _alloc(_name: str, value: str, _uses_nccl: bool) -> Mapped:
    return _ALLOC, value, "the name that torch 2.13 reads"


def _debug(name: str, value: str, uses_nccl: bool) -> Mapped:
    if value.upper() != "DETAIL":
        return name, value, ""
    if uses_nccl:
        return name, value, "slows small collectives 3 to 9 times: for diagnosis only"
    return name, "INFO", "DETAIL crashes DDP on gloo: INFO is used"


_RULES: dict[str, Callable[[str, str, bool], Mapped]] = {
    "NCCL_ASYNC_ERROR_HANDLING": _async,
    _ASYNC: _async,
    "NCCL_BLOCKING_WAIT": _blocking,
    _BLOCKING: _blocking,
    _OLD_ALLOC: _alloc,
    _DEBUG: _debug,
}
