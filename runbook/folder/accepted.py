"""`accepted.json` of a phase: what earlier accepted runs measured there.

The engine writes it when the phase's launches have ended. A run is judged, and judged again, from
this file alone, wherever its folder lies by then and whatever became of the earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runbook.folder.documents import read_json_object
from runbook.folder.names import ACCEPTED_JSON
from runbook.records.evidence import AcceptedRun, AcceptedRuns

_VERSION = 2
# Version 1 did not tell damaged runs from others that were not taken.
_READ = (1, _VERSION)


def accepted_document(
    runs: list[AcceptedRun], left_out: dict[str, str], damaged: dict[str, str]
) -> dict[str, Any]:
    """The document as it is written.

    `left_out` says why of each run that was not taken, `damaged` of each that was accepted, or may
    have been, and whose files cannot be trusted.
    """
    return {
        "schema_version": _VERSION,
        "runs": [
            {
                "run_id": run.run_id,
                "run_sha256": run.run_sha256,
                "rates": list(run.rates),
                "facts": [[*fact, text] for fact, text in sorted(run.facts.items())],
            }
            for run in runs
        ],
        "left_out": left_out,
        "damaged": damaged,
    }


def read_accepted(run_root: Path, phase: str) -> AcceptedRuns | None:
    """The earlier runs that the phase kept, oldest first; None if it looked for none.

    A damaged file holds no runs, and `problem` says what is wrong with it.
    """
    problems: list[str] = []
    document, sha256 = read_json_object(run_root / phase / ACCEPTED_JSON, problems)
    if not sha256:
        return None
    runs: tuple[AcceptedRun, ...] = ()
    left_out: dict[str, str] = {}
    damaged: dict[str, str] = {}
    if document is not None:
        try:
            version = document["schema_version"]
            if version not in _READ:
                raise ValueError(f"schema_version {version!r}")
            runs = tuple(_run(one) for one in document["runs"])
            left_out = _reasons(document["left_out"])
            damaged = _reasons(document["damaged"]) if version == _VERSION else {}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{ACCEPTED_JSON} has another shape: {error}")
    return AcceptedRuns(
        runs=runs,
        left_out=left_out,
        damaged=damaged,
        path=f"{phase}/{ACCEPTED_JSON}",
        sha256=sha256,
        problem="; ".join(problems),
    )


def _reasons(names: Mapping[str, str]) -> dict[str, str]:
    return {str(name): str(why) for name, why in names.items()}


def _run(one: Mapping[str, Any]) -> AcceptedRun:
    rates = tuple(float(rate) for rate in one["rates"])
    if not rates or not all(0.0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates of {one['run_id']} are not all above 0")
    return AcceptedRun(
        run_id=str(one["run_id"]),
        run_sha256=str(one["run_sha256"]),
        rates=rates,
        facts={(str(kind), str(what)): str(text) for kind, what, text in one["facts"]},
    )
