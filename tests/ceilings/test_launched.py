"""The real program: two gloo ranks, one process, a refusal, a rank that dies, a pasted command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa.contract import Ceiling
from phases.machine.ceilings import read_measured
from runbook.config.registry import phases
from runbook.folder.launch.evidence import read_launch
from runbook.launch import run_launch
from runbook.launch.observer import Observer
from runbook.launch.supervision import LaunchOptions
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import LaunchEvidence
from tests.executed import note
from tests.phases import builder

CPU = builder.context("cpu")
CUDA = torch.cuda.is_available()


def planned(where: builder.PlanContext = CPU) -> Launch:
    plan = phases()["preflight"].plan(where)
    return next(launch for launch in plan if launch.kind == "ceilings")


def run(root: Path, launch: Launch) -> tuple[LaunchEvidence, LaunchResult]:
    result = run_launch(launch, LaunchOptions(run_root=root, observer=Observer(), retry=False))
    return read_launch(root, launch, result), result


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LaunchEvidence:
    return run(tmp_path_factory.mktemp("pair"), planned())[0]


def test_two_ranks_measure_everything_that_a_cpu_has(pair: LaunchEvidence) -> None:
    assert pair.result.status is LaunchStatus.COMPLETED, pair.result.cause
    assert [exit.code for exit in pair.result.ranks] == [0, 0]
    assert pair.ceilings is not None and not pair.problems
    token = pair.result.run_token
    for what in Ceiling:
        found = read_measured(pair.ceilings, what, nproc=2, token=token)
        assert len(found) == (0 if what is Ceiling.HOST_COPY else 2), what
        assert all(one.rate > 0 and one.repeats >= 5 for one in found)
        assert found == sorted(found, key=lambda one: one.rate)


def test_one_process_has_no_link_to_measure(tmp_path: Path) -> None:
    words = ("python", "-m", "nsa.ceilings", "--device", "cpu")
    launch = planned().model_copy(update={"argv": words, "nproc": 1})
    made, result = run(tmp_path, launch)
    assert result.ok and made.ceilings is not None
    assert read_measured(made.ceilings, Ceiling.ALL_REDUCE, nproc=1) == []
    (product,) = read_measured(made.ceilings, Ceiling.MATMUL, nproc=1)
    assert product.device_type == "cpu" and product.unit == "TFLOP/s"


@pytest.mark.e2e
@pytest.mark.executes("-m nsa.ceilings")
@pytest.mark.slow
def test_the_printed_line_works_when_pasted(tmp_path: Path) -> None:
    line = planned().command_line()
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    note(line)
    document = json.loads(done.stdout)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert not any(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_gpu_shows_what_its_kind_can_do_within_seconds(tmp_path: Path) -> None:
    words = ("python", "-m", "nsa.ceilings", "--device", "cuda")
    launch = planned().model_copy(update={"argv": words, "nproc": 1})
    made, result = run(tmp_path, launch)
    assert result.ok and made.ceilings is not None, result.cause
    assert result.duration_s < 40, "10 s of measuring, and the imports"
    for what, least in ((Ceiling.MATMUL, 20.0), (Ceiling.MEMORY_COPY, 100.0)):
        (one,) = read_measured(made.ceilings, what, nproc=1)
        assert one.rate > least and one.device_type == "cuda" and one.uuid
    (host,) = read_measured(made.ceilings, Ceiling.HOST_COPY, nproc=1)
    assert 1.0 < host.rate < 500.0
