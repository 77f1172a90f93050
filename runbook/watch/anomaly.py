"""What a detector found, and how a run directory is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from runbook.files import utc_text, write_atomic

__all__ = ["ANOMALY_FILE", "HALT_FILE", "LOG_FILE", "Anomaly", "record_anomaly"]

ANOMALY_FILE = ".anomaly_type"
HALT_FILE = ".HALT"
LOG_FILE = "anomalies.jsonl"


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """One finding: `kind` is a fixed word, `text` one line for a person."""

    kind: str
    text: str
    step: int | None = None
    rank: int | None = None
    path: str = ""

    def line(self) -> str:
        """`kind: text`."""
        return f"{self.kind}: {self.text}"


def record_anomaly(run_dir: Path, anomaly: Anomaly, *, halt: bool) -> None:
    """Append to `anomalies.jsonl`; the first one becomes `.anomaly_type` and, if asked, `.HALT`.

    An existing `.anomaly_type` or `.HALT` is never replaced: the first reason is the reason.
    Raises `OSError` if the disk refuses.
    """
    entry = {"ts": utc_text(), **asdict(anomaly)}
    with (run_dir / LOG_FILE).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
    if not (run_dir / ANOMALY_FILE).exists():
        write_atomic(run_dir / ANOMALY_FILE, anomaly.line() + "\n")
    if halt and not (run_dir / HALT_FILE).exists():
        write_atomic(run_dir / HALT_FILE, anomaly.line() + "\n")
