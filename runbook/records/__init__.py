"""The records that a run leaves behind; `run.json` is one `RunRecord`."""

from __future__ import annotations

# Whatever these define is a record, or makes one.
from runbook.records.launch import *  # noqa: F403
from runbook.records.measurement import *  # noqa: F403
from runbook.records.outcome import *  # noqa: F403
from runbook.records.run import *  # noqa: F403
