"""Files whose fields have any type and any value lose no row, and are never the program's fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runbook.config.registry import PlanContext
from runbook.folder.launch.evidence import read_launch
from runbook.records import Outcome
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.tools.inspect.folder import inspect_path
from tests.phases import builder, spoil, traces
from tests.tiers import few

WHERE: PlanContext = builder.context("cpu", steps_scale=0.2)
FILES = (
    "env.json", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl", "sdpa_audit.json",
    "profile_rank0.json",
)  # fmt: skip
# What may stand where a number, a text, a list or a mapping is expected.
ODD: tuple[Any, ...] = (
    None, "", "x", "5", 5, 0, -1, 10**40, 1e308, 0.5, float("nan"), float("inf"), True, [], ["x"],
    [None], [[1]], {}, {"a": "b"}, {"a": {"b": [1]}},
)  # fmt: skip


def places(document: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every value inside a document, as the keys that lead to it."""
    inner = document.items() if isinstance(document, dict) else ()
    inner = enumerate(document) if isinstance(document, list) else inner
    below = [one for key, value in inner for one in places(value, (*path, str(key)))]
    return [*([path] if path else []), *below]


def spoiled(text: str, name: str, random: Random) -> str:
    """The file with one to three values changed; a heartbeat file line by line."""
    lines = [json.loads(line) for line in ([text] if name.endswith(".json") else text.splitlines())]
    for _ in range(random.randint(1, 3)):
        kind = random.choice(sorted({str(line.get("event")) for line in lines}))
        at = random.choice([i for i, one in enumerate(lines) if str(one.get("event")) == kind])
        if where := places(lines[at]):
            lines[at] = spoil.put(lines[at], [*random.choice(where)], random.choice(ODD))
    return "".join(json.dumps(line) + "\n" for line in lines)


def from_disk(root: Path, found: PhaseEvidence) -> PhaseEvidence:
    def read(made: LaunchEvidence) -> LaunchEvidence:
        if made.launch.kind != "trainer":
            return made
        found = read_launch(root, made.launch, made.result)
        return replace(found, files={**found.files, "trace": made.files["trace"]})

    return replace(found, launches={name: read(made) for name, made in found.launches.items()})


def written(root: Path, phase: str) -> PhaseEvidence:
    earlier = {
        name: builder.evidence(name, WHERE)
        for name in builder.PHASES[phase].reads + (("baseline",) if phase == "single_gpu" else ())
    }
    found = builder.evidence(phase, WHERE, earlier=earlier)
    for made in found.launches.values():
        if made.launch.kind == "trainer":
            traces.write_launch(root, made)
    return found


@pytest.mark.parametrize("phase", builder.TRAINING)
def test_what_is_written_is_judged_as_what_was_made(tmp_path: Path, phase: str) -> None:
    found = written(tmp_path, phase)
    made = builder.judge(phase, found, WHERE).checks
    read = builder.judge(phase, from_disk(tmp_path, found), WHERE).checks
    assert [(one.id, one.outcome) for one in read] == [(one.id, one.outcome) for one in made]


@pytest.mark.parametrize("phase", builder.TRAINING)
def test_no_type_of_a_field_loses_a_row(tmp_path: Path, phase: str) -> None:
    found = written(tmp_path, phase)
    first = next(one.launch for one in found.launches.values() if one.launch.kind == "trainer")
    files = [path for name in FILES if (path := tmp_path / first.run_dir / name).exists()]
    random = Random(phase)
    for number in range(len(few(range(20)))):
        file = files[number % len(files)]
        text = file.read_text()
        changed = spoiled(text, file.name, random)
        file.write_text(changed)
        builder.judge(phase, from_disk(tmp_path, found), WHERE)
        inspect_path(file.parent)
        file.write_text(text)


ENVIRONMENTS: list[Any] = [
    [], "x", 5, {}, {"effective": "x"}, {"effective": [], "config": 5, "toggles": 3, "device": 1},
]  # fmt: skip


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=[str(env)[:20] for env in ENVIRONMENTS])
@pytest.mark.parametrize("phase", ["baseline", "fused_adamw"])
def test_an_env_json_of_another_shape_is_never_a_pass(tmp_path: Path, phase: str, env: Any) -> None:
    found = written(tmp_path, phase)
    for made in found.launches.values():
        if made.launch.kind == "trainer":
            (tmp_path / made.launch.run_dir / "env.json").write_text(json.dumps(env))
    judgement = builder.judge(phase, from_disk(tmp_path, found), WHERE)
    rows = {check.id: check for check in judgement.checks}
    for what in ("as_planned", "plausible", "accounts", "oracle"):
        assert rows[f"{phase}.{what}"].outcome is not Outcome.PASS


def test_ends_of_ranks_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    made = builder.evidence("baseline", WHERE).launches["run1"]
    path = traces.write_launch(tmp_path, made) / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ranks": [{"rank": "x"}]}))
    said = [remark.message for remark in inspect_path(path.parent).remarks]
    assert "result.json: is no end of a launch" in said
