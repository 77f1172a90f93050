"""run.json: the one place where it is opened, and how it is written."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from runbook.files import read_bytes, write_atomic
from runbook.folder.names import RECORD_FILE
from runbook.records import RunRecord

# Enough of a fingerprint that nobody makes another record with the same digits.
FINGERPRINT_DIGITS = 32
# The name of a run's folder: when it began, the commit, and a number within the same second.
RUN_ID = re.compile(r"(?P<time>\d{8}T\d{6}Z)-[0-9a-z]{1,40}(?:-\d{1,3})?")


def record_bytes(folder: Path) -> bytes:
    """run.json as it lies there. Raises `OSError`."""
    return read_bytes(folder / RECORD_FILE)


def load_record(folder: Path) -> RunRecord:
    """The record in run.json. Raises `OSError`, or `ValueError` if this version has none such."""
    return RunRecord.model_validate_json(record_bytes(folder))


def write_record(folder: Path, record: RunRecord) -> None:
    """Write run.json, replaced at once. Raises `OSError`."""
    write_atomic(folder / RECORD_FILE, record_text(record))


def record_text(record: RunRecord) -> str:
    """What run.json holds: one form only, so that an edit anywhere shows."""
    return record.model_dump_json(indent=2) + "\n"


def fingerprint_of(record: RunRecord) -> str:
    """SHA-256 of run.json, which has the digest of every artifact and all that was judged of them.

    Kept outside of the run's folder, it shows a forgery that is consistent within. Reports are no
    part of it: they are a rendering of run.json.
    """
    return hashlib.sha256(record_text(record).encode()).hexdigest()


def shown_fingerprint(digest: str) -> str:
    """As many digits as are printed."""
    return digest[:FINGERPRINT_DIGITS]
