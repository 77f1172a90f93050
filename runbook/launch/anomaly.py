"""When a reading is an anomaly: the seeds' watchdog, adjusted by `NSA_WATCH_*`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nsa.contract import NSAError
from nsa.toggles import TOGGLES
from runbook.errors import UsageError
from runbook.files import utc_text, write_atomic

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


_FIELDS = {
    "NSA_WATCH_HEARTBEAT_STALL_S": "heartbeat_stall_s",
    "NSA_WATCH_FLATLINE_N": "flatline_n",
    "NSA_WATCH_GATE_COLLAPSE_N": "gate_collapse_n",
    "NSA_WATCH_GATE_ENTROPY_MIN": "gate_entropy_min",
    "NSA_WATCH_GATE_MAX_THRESHOLD": "gate_max",
    "NSA_WATCH_INTERVAL_S": "interval_s",
    "NSA_WATCH_HALT": "halt",
}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits of the detectors. Counts are readings in a row; 0 switches a detector off.

    The first seven are toggles with the seeds' values. The others have none: a spike is a loss
    above the recent median by half of it (and by ten of its spreads), an explosion is a gradient
    norm a hundred times the recent median, growth is memory that rises in five blocks of ten
    readings in a row by a quarter and by 256 MiB.
    """

    heartbeat_stall_s: float = 180.0
    flatline_n: int = 4
    gate_collapse_n: int = 3
    gate_entropy_min: float = 0.2
    gate_max: float = 0.9
    interval_s: float = 30.0
    halt: bool = True
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
        chosen: dict[str, object] = {}
        problems = []
        for name, field in _FIELDS.items():
            if name not in variables:
                continue
            try:
                chosen[field] = TOGGLES[name].parse(variables[name])
            except NSAError as error:
                problems.append(str(error))
        if problems:
            raise UsageError(problems)
        return cls(**chosen)  # type: ignore[arg-type]
