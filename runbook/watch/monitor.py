"""All detectors that need nothing but a run directory's tables."""

from __future__ import annotations

from pathlib import Path

from runbook.read.training import LEGACY_COLUMNS
from runbook.watch.anomaly import Anomaly, record_anomaly
from runbook.watch.detectors import GateDetector, RowDetectors
from runbook.watch.tail import TableTail
from runbook.watch.thresholds import Thresholds

__all__ = ["Monitor"]


class Monitor:
    """Reads what was added to training.csv and gates.csv since the last look."""

    def __init__(self, run_dir: Path, limits: Thresholds) -> None:
        self.run_dir, self.limits = run_dir, limits
        self._training = TableTail(run_dir / "training.csv", headerless=LEGACY_COLUMNS)
        self._gates = TableTail(run_dir / "gates.csv")
        self._rows, self._gate = RowDetectors(limits), GateDetector(limits)
        self.rows_read = 0

    def look(self) -> list[Anomaly]:
        """What the new rows show, in their order."""
        found = []
        for row in self._training.rows():
            self.rows_read += 1
            found += [self._named(a, self._training) for a in self._rows.feed(row)]
        for row in self._gates.rows():
            found += [self._named(a, self._gates) for a in self._gate.feed(row)]
        return found

    def look_and_record(self) -> list[Anomaly]:
        """Look, write down what was found, and halt the run if that is wanted."""
        found = self.look()
        for anomaly in found:
            record_anomaly(self.run_dir, anomaly, halt=self.limits.halt)
        return found

    @staticmethod
    def _named(anomaly: Anomaly, table: TableTail) -> Anomaly:
        fields = vars(anomaly) | {"path": table.path.name}
        return Anomaly(**fields)
