"""NCCL's own flight dump, which its watchdog writes before it aborts the process.

A dump is a pickle of plain values (torch, "Flight Recorder"; the file is `PREFIX` + rank). Nothing
in it may name a class or a function, so that reading one runs no code.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Never

from nsa.contract import NCCL_FLIGHTS


class _PlainValues(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Never:
        """Raises UnpicklingError: a dump holds no objects."""
        raise pickle.UnpicklingError(f"a flight dump does not hold {module}.{name}")


def nccl_flight_files(run_dir: Path) -> dict[int, Path]:
    """The dumps of a run directory, by rank."""
    return NCCL_FLIGHTS.found_in(run_dir)


def read_nccl_rows(data: bytes) -> list[list[Any]] | None:
    """Rows as in the trainer's own flight records; None if this is no dump."""
    try:
        document = _PlainValues(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError,
            AttributeError, OverflowError, UnicodeDecodeError, MemoryError):  # fmt: skip
        # Whatever a torn or foreign file makes of the pickle machine.
        return None
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return None
    return [
        [
            entry.get("collective_seq_id"),
            str(entry.get("profiling_name", "")).partition(":")[2],
            entry.get("input_sizes", []),
            entry.get("input_dtypes", []),
            entry.get("time_created_ns"),
        ]
        for entry in entries
        if isinstance(entry, dict) and not entry.get("is_p2p")
    ]
