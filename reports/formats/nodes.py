"""`nodes.json`: nodes of a cluster that a check, or the end of a launch, holds to be at fault.

The command that takes one out is its launcher's, kept with the run. It is shown and never run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from runbook.folder import RESULT_JSON
from runbook.records import Confidence, Measurement, RunRecord
from runbook.records.run import TAKES_OUT, Report, Screen

_SUREST_FIRST = (Confidence.CONFIRMED, Confidence.REPORTED, Confidence.SUSPECTED)


class _Word(NamedTuple):
    """What one check or launch (`source`) says of a node."""

    node: str
    source: str
    reason: str
    confidence: Confidence
    evidence: Sequence[str]
    number: Measurement | None = None


def accused_of(record: RunRecord) -> list[Mapping[str, Any]]:
    """The nodes that the record names, each once, as `nodes.json` has them, the surest first."""
    words = sorted(_words(record), key=lambda one: _SUREST_FIRST.index(one.confidence))
    said = {name: [one for one in words if one.node == name] for name in (w.node for w in words)}
    return [
        {
            "node": node,
            "reason": _told(first),
            "confidence": first.confidence,
            "evidence": list(
                dict.fromkeys(path for one in (first, *more) for path in one.evidence)
            ),
            "numbers": [
                {"name": n.name, "value": n.value, "unit": n.unit, "path": n.path}
                for n in (one.number for one in (first, *more))
                if n is not None
            ],
            "also": [_told(one) for one in more],
            "command": _command(record, first),
        }
        for node, (first, *more) in said.items()
    ]


def _words(record: RunRecord) -> Iterator[_Word]:
    for phase in record.phases:
        for check in phase.checks:
            said = (check.id, check.reason, check.confidence, check.evidence, check.measurement)
            yield from (_Word(node, *said) for node in check.nodes)
        for launch, result in ((entry.launch, entry.result) for entry in phase.launches):
            why = "; ".join(result.notes) if result.ok else result.cause
            sure = Confidence.SUSPECTED if result.ok else Confidence.REPORTED
            files = result.evidence or (f"{launch.run_dir}/{RESULT_JSON}",)
            if result.node:
                yield _Word(result.node, launch.id, why, sure, files)


def _told(word: _Word) -> str:
    return f"{word.source}: {word.reason}"


def _command(record: RunRecord, word: _Word) -> str:
    """What a person may type; empty where the run does not say how."""
    said = {"node": word.node, "reason": f"{word.source} of runbook {record.run_id}"}
    words = record.environment.get(TAKES_OUT, "")
    return re.sub(r"\{(node|reason)\}", lambda found: shlex.quote(said[found[1]]), words)


def render_nodes(record: RunRecord, _: Screen) -> str:
    """Return `nodes.json`; a run on one machine has none of them."""
    document = {
        "schema_version": 1,
        "run": record.run_id,
        "verdict": record.said,
        "reasons": list(record.reasons),
        "nodes": accused_of(record),
    }
    return json.dumps(document, indent=2) + "\n"


NODES = Report(file_name="nodes.json", render=render_nodes)
