"""`nodes.json`: nodes of a cluster that a check, or the end of a launch, holds to be at fault.

The command that takes one out is its launcher's, kept with the run. It is shown and never run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from runbook.folder import RESULT_JSON
from runbook.records import Confidence, LaunchResult, Measurement, RunRecord
from runbook.records.run import TAKES_OUT, Report, Screen

_SUREST_FIRST = (Confidence.CONFIRMED, Confidence.REPORTED, Confidence.SUSPECTED)


@dataclass(frozen=True, kw_only=True)
class _Word:
    """What one check or launch (`source`) says of a node."""

    node: str
    source: str
    reason: str
    confidence: Confidence
    evidence: tuple[str, ...]
    number: Measurement | None = None


@dataclass(frozen=True, kw_only=True)
class Accused:
    """A node with all that is said of it, the surest first; `command` takes it out, if it can."""

    said: tuple[_Word, ...]
    command: str

    @property
    def node(self) -> str:
        """Its name in the cluster."""
        return self.said[0].node

    @property
    def confidence(self) -> Confidence:
        """What speaks against it, at the surest."""
        return self.said[0].confidence

    @property
    def reason(self) -> str:
        """What is said of it by the surest source, named first."""
        return f"{self.said[0].source}: {self.said[0].reason}"


def accused_of(record: RunRecord) -> tuple[Accused, ...]:
    """The nodes that the record names, the surest first, each once."""
    words = sorted(_words(record), key=lambda one: _SUREST_FIRST.index(one.confidence))
    named = dict.fromkeys(one.node for one in words)
    return tuple(
        Accused(said=said, command=_command(record, said[0]))
        for said in (tuple(one for one in words if one.node == node) for node in named)
    )


def _words(record: RunRecord) -> Iterator[_Word]:
    for phase in record.phases:
        for check in phase.checks:
            for node in check.nodes:
                yield _Word(
                    node=node,
                    source=check.id,
                    reason=check.reason,
                    confidence=check.confidence,
                    evidence=check.evidence,
                    number=check.measurement,
                )
        for entry in phase.launches:
            if entry.result.node:
                yield _of_launch(entry.launch.id, entry.launch.run_dir, entry.result)


def _of_launch(source: str, run_dir: str, result: LaunchResult) -> _Word:
    return _Word(
        node=result.node,
        source=source,
        reason="; ".join(result.notes) if result.ok else result.cause,
        confidence=Confidence.SUSPECTED if result.ok else Confidence.REPORTED,
        evidence=result.evidence or (f"{run_dir}/{RESULT_JSON}",),
    )


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
        "nodes": [
            {
                "node": one.node,
                "reason": one.reason,
                "confidence": one.confidence,
                "evidence": list(
                    dict.fromkeys(path for word in one.said for path in word.evidence)
                ),
                "numbers": [
                    {"name": n.name, "value": n.value, "unit": n.unit, "path": n.path}
                    for n in (word.number for word in one.said)
                    if n is not None
                ],
                "also": [f"{word.source}: {word.reason}" for word in one.said[1:]],
                "command": one.command,
            }
            for one in accused_of(record)
        ],
    }
    return json.dumps(document, indent=2) + "\n"


NODES = Report(file_name="nodes.json", render=render_nodes)
