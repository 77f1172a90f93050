"""Readers of what a launch leaves behind; they never raise for what a file holds.

A format is read here and nowhere else, whoever needs it; nothing here judges, signals or waits.
"""

from __future__ import annotations

from runbook.read.documents import file_sha256
from runbook.read.history import read_heartbeats
from runbook.read.launch import read_launch, read_training_csv

__all__ = ["file_sha256", "read_heartbeats", "read_launch", "read_training_csv"]
