"""The shipped stages for real, on a CPU: the programs that a device will run, with small shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.cli.finished import run_folders
from tests.cli.shell import runbook
from tests.tools.acceptance.made import DEVICE, handed_over

_PARTS = 4
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def rehearse(folder: Path, stage: str) -> dict[str, object]:
    """The stage's own result, after the whole command; on a busy machine after several parts."""
    for _ in range(_PARTS):
        ended = runbook(
            *("gpu-acceptance", "--stand-in", "--stage", stage, "--work", str(folder / "work")),
            *("--out", str(folder / "out")),
            cwd=folder, timeout_s=900, OMP_NUM_THREADS="1",
        )  # fmt: skip
        document = handed_over(folder)
        if document["stages"][stage]["status"] != "CUT OFF":
            break
    assert ended.code == 4, (ended.err, document["stages"][stage])
    assert document["stages"][stage]["status"] == "PASS"
    results = json.loads((folder / "out" / DEVICE / "results.json").read_text())
    result: dict[str, object] = results[stage]
    return result


def test_device(tmp_path: Path) -> None:
    rehearse(tmp_path, "device")
    text = (tmp_path / "work" / DEVICE / "device" / "collect_env.txt").read_text()
    assert "PyTorch version:" in text


def test_tests(tmp_path: Path) -> None:
    assert rehearse(tmp_path, "tests")["summary"] == "1 passed"


def test_attention(tmp_path: Path) -> None:
    result = rehearse(tmp_path, "attention")
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [(row["seq_len"], row["arm"]) for row in rows] == [
        (256, "nsa"), (256, "dense"), (512, "nsa"), (512, "dense"),
    ]  # fmt: skip
    assert all(row["right"] and row["compared"] == "outputs and gradients" for row in rows)


def test_evidence(tmp_path: Path) -> None:
    rehearse(tmp_path, "evidence")
    fixtures = tmp_path / "work" / DEVICE / "evidence" / "fixtures" / "asleep"
    names = {path.name for path in fixtures.iterdir()}
    assert {"flight_rank0.json", "flight_rank1.json", "incident.json"} <= names
    checkout = str(Path(__file__).parents[3])
    assert not any(checkout in path.read_text() for path in fixtures.iterdir())


def test_step(tmp_path: Path) -> None:
    result = rehearse(tmp_path, "step")
    pairs, batches = result["pairs"], result["batches"]
    assert isinstance(pairs, list) and isinstance(batches, list)
    assert all(pair.get("ratio", 0) > 0 for pair in pairs if not pair.get("not_run"))
    assert [row["batch"] for row in batches] == [2, 4]
    # An arm that this machine cannot run is an answer, with its reason.
    (graphs,) = (pair for pair in pairs if pair["variant"] == "compile_graphs")
    assert graphs["not_run"] and "CUDA graphs need a CUDA device" in graphs["problem"]
    assert len([pair for pair in pairs if "ratio" in pair]) == 2


def test_the_run_is_one_run_and_its_verdict_names_its_scope(tmp_path: Path) -> None:
    result = rehearse(tmp_path, "run")
    assert str(result["headline"]).startswith("GO for 22 of ")
    folders = run_folders(tmp_path / "work" / DEVICE / "run" / "runs")
    assert len(folders) == 1
    record = json.loads((folders[0] / "run.json").read_text())
    assert record["command"].startswith("python3 -m runbook.tools.acceptance.run --out ")
    assert runbook("verify", str(folders[0]), cwd=tmp_path).code == 0
