"""Write the schemas of run.json and of a run's events: `python scripts/schemas.py`.

Both are made from the records; run it after every change of one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runbook.launch.observer import events_schema
from runbook.records import RunRecord

DOCS = Path(__file__).resolve().parents[1] / "docs"


def schemas() -> dict[str, dict[str, Any]]:
    """Each document by the name of its file."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {
        "run.schema.json": draft | RunRecord.model_json_schema(),
        "events.schema.json": draft | events_schema(),
    }


if __name__ == "__main__":
    for name, document in schemas().items():
        (DOCS / name).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
