"""Variables that belong to torch, NCCL and CUDA: recorded, and old spellings translated.

torch ignores several names that people set, and breaks on some values (E11 to E14). `plan` says
what becomes of each; nothing is dropped or renamed without a note. Torch-free.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_ALLOC = "PYTORCH_ALLOC_CONF"
_OLD_ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# An old name that is only another spelling of a new one.
ALIASES = {_OLD_ALLOC: _ALLOC}

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


@dataclass(frozen=True)
class Passed:
    """One variable as found, the variable and value that torch will read, and why."""

    name: str
    value: str
    mapped_to: str | None
    mapped_value: str | None
    note: str

    def describe(self) -> dict[str, str | None]:
        """The row of env.json."""
        mapped = f"{self.mapped_to}={self.mapped_value}" if self.mapped_to else None
        return {"name": self.name, "value": self.value, "mapped_to": mapped, "note": self.note}


def plan(environ: Mapping[str, str], *, uses_nccl: bool) -> tuple[list[Passed], list[str]]:
    """What becomes of each variable that is set, and what is wrong with them."""
    problems = []
    if _OLD_ALLOC in environ and _ALLOC in environ:
        problems.append(
            f"{_OLD_ALLOC} and {_ALLOC} are both set: one is an alias of the other; "
            f"keep only {_ALLOC}, the one that torch reads"
        )
    found = [(name, environ[name]) for name in TORCH_VARIABLES if name in environ]
    return [Passed(name, text, *_mapped(name, text, uses_nccl)) for name, text in found], problems


def flight_dumps(prefix: str) -> dict[str, str]:
    """Variables by which NCCL's watchdog dumps the last collectives to `prefix` + rank.

    Without a prefix the dumps go to ~/.cache/torch.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def translate(passed: Sequence[Passed], environ: MutableMapping[str, str]) -> None:
    """Give torch the variables under the names it reads; it looks when it is imported."""
    for row in passed:
        if row.mapped_to != row.name:
            del environ[row.name]
    for row in passed:
        if row.mapped_to and row.mapped_value:
            environ[row.mapped_to] = row.mapped_value
    # Otherwise torch's profiler writes lines of its own between ours.
    environ.setdefault("KINETO_LOG_LEVEL", "99")


def _mapped(name: str, value: str, uses_nccl: bool) -> tuple[str | None, str | None, str]:
    """Name and value that torch will read of a variable, and why they are others."""
    if name == _OLD_ALLOC:
        return _ALLOC, value, "the name that this torch reads"
    if name in ("NCCL_BLOCKING_WAIT", _BLOCKING):
        if value == "0":
            return _BLOCKING, "0", ""
        why = "dropped: with it there is no NCCL watchdog thread and no flight-recorder dump"
        return None, None, why
    if name in ("NCCL_ASYNC_ERROR_HANDLING", _ASYNC):
        if not uses_nccl or value == "0":
            # Under torchrun the new name is always set, by torchrun itself.
            silent = uses_nccl or name == _ASYNC
            return _ASYNC, value, "" if silent else "without effect: no NCCL here"
        # 3 ends the process and leaves the flight recorder usable; 1 is incompatible with it.
        why = "torchrun forces 1, with which the flight recorder does not work: 3 is used"
        return _ASYNC, "3", why
    if name == _DEBUG and value.upper() == "DETAIL":
        if uses_nccl:
            return name, value, "slows small collectives 3 to 9 times: for diagnosis only"
        return name, "INFO", "DETAIL crashes DDP on gloo: INFO is used"
    return name, value, ""


@contextmanager
def for_good() -> Iterator[None]:
    """What is imported inside is not searched for garbage, now or in any later collection.

    torch makes a million objects. Without this the collector goes through them again and again
    while they are made, a fifth of the start of a rank, and once more wherever it looks at all.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
