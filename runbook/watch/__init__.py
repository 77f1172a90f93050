"""Watching a run directory for what goes wrong slowly: numbers, gates, memory, silence."""

from __future__ import annotations

from runbook.watch.anomaly import Anomaly, record_anomaly
from runbook.watch.monitor import Monitor
from runbook.watch.thresholds import Thresholds

__all__ = ["Anomaly", "Monitor", "Thresholds", "record_anomaly"]
