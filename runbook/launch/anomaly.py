"""What an anomaly is, when a reading is one (`NSA_WATCH_*`), and where it is written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nsa.contract import HALT_FILE, NSAError
from nsa.toggles import TOGGLES
from runbook.errors import UsageError
from runbook.files import utc_text, write_atomic
from runbook.read.documents import ANOMALIES_JSONL, ANOMALY_TYPE


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
    with (run_dir / ANOMALIES_JSONL).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
    if not (run_dir / ANOMALY_TYPE).exists():
        write_atomic(run_dir / ANOMALY_TYPE, anomaly.line() + "\n")
    if halt and not (run_dir / HALT_FILE).exists():
        write_atomic(run_dir / HALT_FILE, anomaly.line() + "\n")


def _toggle(name: str) -> Any:
    """A field with the default of `NSA_WATCH_<name>`, which owns the number."""
    toggle = f"NSA_WATCH_{name}"
    return field(default=TOGGLES[toggle].default, metadata={"toggle": toggle})


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits of the detectors. Counts are readings in a row; 0 switches a detector off.

    The first seven are toggles, which own their defaults. The others are not: a spike is a loss
    above the recent median by half of it (and by ten of its spreads), an explosion is a gradient
    norm a hundred times the recent median, growth is memory that rises in five blocks of ten
    readings in a row by a quarter and by 256 MiB.
    """

    heartbeat_stall_s: float = _toggle("HEARTBEAT_STALL_S")
    flatline_n: int = _toggle("FLATLINE_N")
    gate_collapse_n: int = _toggle("GATE_COLLAPSE_N")
    gate_entropy_min: float = _toggle("GATE_ENTROPY_MIN")
    gate_max: float = _toggle("GATE_MAX_THRESHOLD")
    interval_s: float = _toggle("INTERVAL_S")
    halt: bool = _toggle("HALT")
    zero_gradient_n: int = 3
    spike_share: float = 0.5
    spike_spreads: float = 10.0
    explosion_factor: float = 100.0
    growth_blocks: int = 5
    growth_block_rows: int = 10
    growth_share: float = 0.25
    growth_mib: float = 256.0

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Thresholds:
        """The defaults, changed by the `NSA_WATCH_*` among `variables`.

        Raises `UsageError` that lists every bad value.
        """
        chosen: dict[str, Any] = {}
        problems = []
        for part in fields(cls):
            toggle: str = part.metadata.get("toggle", "")
            if toggle not in variables:
                continue
            try:
                chosen[part.name] = TOGGLES[toggle].parse(variables[toggle])
            except NSAError as error:
                problems.append(str(error))
        if problems:
            raise UsageError(problems)
        return cls(**chosen)
