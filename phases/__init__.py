"""The runbook's phases: one file and one class for each section."""

from __future__ import annotations

__distribution__ = "nsa-runbook"
