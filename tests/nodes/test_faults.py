"""Jobs on two nodes that fail in every way: noticed, named with their node, nothing left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runbook.folder.launch.evidence import read_launch
from runbook.launch.nodes.files import JOB_JSON, last_state
from runbook.launch.observer import StopRequest
from runbook.process import carriers
from runbook.records import Launch, LaunchResult, LaunchStatus
from tests.cli.shell import runbook
from tests.factory.tables import table
from tests.launch.helpers import FAKE, At
from tests.nodes.helpers import (
    Notes,
    Place,
    check_on_one_and_two_nodes,
    killed_in_the_middle,
    killed_while_it_trains,
    processes_of,
    two_ranks,
)
from tests.shared import crowded

LONG = pytest.mark.slow


def job(run_dir: Path) -> dict[str, str | int]:
    found: dict[str, str | int] = json.loads((run_dir / JOB_JSON).read_text())
    return found


def test_a_healthy_launch_leaves_what_one_machine_leaves(place: Place, tmp_path: Path) -> None:
    launch = two_ranks("--dt", "0.1")  # long enough for its agent to see it
    result = place.run(launch, tmp_path)
    assert (result.status, result.exit_code, result.cause) == (LaunchStatus.COMPLETED, 0, "")
    first, last = place.cluster.names
    told = [(end.rank, end.code, end.steps_done, end.node) for end in result.ranks]
    assert told == [(0, 0, 20, first), (1, 0, 20, last)]
    assert result.node == ""
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.problems == ()
    assert evidence.training is not None and len(evidence.training.frame) == 20
    assert evidence.devices_before and evidence.kernel_log and evidence.load
    kept = json.loads((tmp_path / f"{place.kind}_nodes.json").read_text())["nodes"]
    assert kept == [first, last]
    for index, name in enumerate(kept):
        said = last_state(tmp_path / launch.run_dir / "nodes" / name)
        assert said is not None and list(said.ranks) == [index]


@LONG
@table(__file__, "rank_faults")
def test_a_rank_that_fails_is_named_with_its_node(
    place: Place, tmp_path: Path, fault: str, status: str, words: str
) -> None:
    result = place.run(two_ranks("--fault", fault), tmp_path)
    assert (result.status, result.culprit_rank) == (status, 1), result
    assert words in result.cause and f"rank 1 ran on node {place.last}" in result.cause
    if fault == "hang":
        stacks = [path for path in result.evidence if "stackdump_rank1" in path]
        assert "in fault" in (tmp_path / stacks[0]).read_text()


def parent_killed(_: Place, run_dir: Path) -> None:
    for process in processes_of(run_dir, "n1"):
        with suppress(psutil.Error):  # some of them come and go
            if FAKE in process.cmdline() and "RANK" not in process.environ():
                process.kill()


def canceled(place: Place, run_dir: Path) -> None:
    place.cluster.tool("scancel", str(job(run_dir)["job_id"]))


def evicted(place: Place, _: Path) -> None:
    place.cluster.evict("k1")


@LONG
@pytest.mark.parametrize(
    ("place", "act", "status", "words"),
    [
        ("slurm", parent_killed, LaunchStatus.CRASHED,
         "the ranks' parent on node n1 was ended by SIGKILL"),
        ("slurm", canceled, LaunchStatus.PREEMPTED,
         "was ended in Slurm by somebody else (state CANCELLED)"),
        ("kubernetes", evicted, LaunchStatus.PREEMPTED,
         "on node k1 was taken away by Kubernetes: EvictionByEvictionAPI"),
    ],
    indirect=["place"],
)  # fmt: skip
def test_what_happens_to_a_job_is_told_apart(
    place: Place,
    tmp_path: Path,
    act: Callable[[Place, Path], None],
    status: LaunchStatus,
    words: str,
) -> None:
    def happens(launch: Launch) -> None:
        act(place, tmp_path / launch.run_dir)

    result = place.run(two_ranks(steps=2000), tmp_path, observer=At(3, happens))
    assert result.status is status, result
    assert words in result.cause and result.node == ""


@LONG
def test_a_stop_request_ends_everything_within_five_seconds(place: Place, tmp_path: Path) -> None:
    stop, asked = StopRequest(), []

    def request(_: Launch) -> None:
        asked.append(time.monotonic())
        stop.request("SIGTERM")

    result = place.run(two_ranks(steps=2000), tmp_path, observer=At(3, request), stop=stop)
    assert result.status is LaunchStatus.INTERRUPTED
    assert time.monotonic() - asked[0] < crowded(5)
    # A rank that is too slow on a busy machine is ended without its own word.
    assert 13 in {exit_.code for exit_ in result.ranks} <= {13, None}


def drained(place: Place) -> None:
    place.cluster.tool("scontrol", "update", "nodename=n1", "state=drain", "reason=out for repair")


def cordoned(place: Place) -> None:
    place.cluster.cordoned.add("k1")


@LONG
@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        ("slurm", drained, "DRAINED"),
        ("kubernetes", cordoned, "Unschedulable: 0/2 nodes are available: 1 unschedulable"),
    ],
    indirect=["place"],
)  # fmt: skip
def test_a_job_that_never_starts_is_refused_in_the_clusters_words(
    place: Place, tmp_path: Path, change: Callable[[Place], None], words: str
) -> None:
    change(place)
    notes = Notes()
    try:
        waits = place.launcher(tmp_path, queue_s=8, notes=notes)
        result = place.run(two_ranks(), tmp_path, launcher=waits)
    finally:
        if change is drained:
            place.cluster.tool("scontrol", "update", "nodename=n1", "state=resume")
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR
    assert "never started" in result.cause and "the limit is 8 s (--queue-s)" in result.cause
    assert words in result.cause
    assert any("waits in the queue" in text for text in notes.said)


@pytest.mark.parametrize(
    ("place", "what", "begins", "words"),
    [
        pytest.param("slurm", "no_such", "sbatch refused the job: ", "invalid partition",
                     marks=LONG),
        ("kubernetes", "jobs", "Kubernetes refused the Job: ", "exceeded quota: gpus"),
    ],
    indirect=["place"],
)  # fmt: skip
def test_what_the_cluster_refuses_is_told_in_its_words(
    place: Place, tmp_path: Path, what: str, begins: str, words: str
) -> None:
    if place.kind == "kubernetes":
        place.cluster.quota.add(what)
    asks = place.launcher(tmp_path, partition=what)
    result = place.run(two_ranks(), tmp_path, launcher=asks, retry=True)
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR and result.attempts == 1
    assert result.cause.startswith(begins) and words in result.cause
    deadline = time.monotonic() + crowded(10)
    while place.cluster.left() and time.monotonic() < deadline:
        time.sleep(0.05)


@LONG
def test_a_harness_that_is_killed_finds_its_job_again(place: Place, tmp_path: Path) -> None:
    launch = two_ranks("--dt", "0.05", steps=60)
    run_dir = killed_while_it_trains(place, launch, tmp_path)
    before, notes = job(run_dir), Notes()
    result = place.adopted(launch, tmp_path, notes)
    assert result is not None and result.status is LaunchStatus.COMPLETED, result
    called = before["job_id"] or f"runbook-{before['run_token']}"
    assert notes.said == [f"one: job {called} outlived its harness and is watched again"]
    assert job(run_dir) == before
    assert LaunchResult.model_validate_json((run_dir / "result.json").read_text()) == result
    assert [e.steps_done for e in result.ranks] == [60, 60]
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.training is not None and len(evidence.training.frame) == 60
    assert carriers(result.run_token) == []


@LONG
def test_nothing_is_adopted_where_no_job_is_left(place: Place, tmp_path: Path) -> None:
    launch = two_ranks(steps=3)
    place.run(launch, tmp_path)
    run_dir = tmp_path / launch.run_dir
    # Its harness saw the end.
    assert place.adopted(launch, tmp_path, Notes()) is None
    (run_dir / "result.json").unlink()
    if place.kind == "kubernetes":  # Slurm knows a job long after its end
        said = run_dir / "nodes/k0/node.jsonl"
        kept = said.read_text()
        said.write_text("")
        assert place.adopted(launch, tmp_path, Notes()) is None
        said.write_text(kept)
    # A job of another token is not this launch's.
    (run_dir / JOB_JSON).write_text(json.dumps(job(run_dir) | {"run_token": "ab" * 16}))
    assert place.adopted(launch, tmp_path, Notes()) is None


@LONG
def test_a_node_that_goes_down_is_named(place: Place, tmp_path: Path) -> None:
    began: list[float] = []

    def power_off(_: Launch) -> None:
        began.append(time.monotonic())
        place.cluster.power_off(place.last)

    try:
        result = place.run(two_ranks(steps=5000), tmp_path, observer=At(3, power_off))
    finally:
        place.cluster.power_on(place.last)
    assert result.status is LaunchStatus.HARDWARE_ERROR, result
    lost = f"node {place.last} is lost: nothing heard from it for "
    assert result.cause.startswith(lost) and result.node == place.last
    calls = "Kubernetes calls it Ready=Unknown, NodeStatusUnknown"
    assert place.kind == "slurm" or calls in result.cause
    assert time.monotonic() - began[0] < crowded(60)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("place", "words", "code"),
    [
        ("slurm", ("--launcher", "slurm"), 0),  # the whole CPU plan
        ("kubernetes", ("--launcher", "kubernetes:pod.yaml", "--phase", "preflight,baseline"), 4),
    ],
    indirect=["place"],
)
def test_a_run_passes_though_its_harness_was_killed(
    place: Place, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    environment = place.cluster.environment
    asked = ("--profile", "cpu", "--nodes", "2", *words)
    run_root = killed_in_the_middle(tmp_path, environment, *asked)
    left = json.loads((run_root / "baseline/run1/job.json").read_text())
    if place.kind == "kubernetes":
        place.pod.unlink()  # it goes on with the pod that it began with
    done = runbook("run", "--resume", run_root.name, cwd=tmp_path, timeout_s=900, **environment)
    called = left["job_id"] or f"runbook-{left['run_token']}"
    assert f"job {called} outlived its harness" in done.err
    assert done.code == code, done.out
    record = json.loads((run_root / "run.json").read_text())
    assert record["verdict"] == {0: "GO", 4: "PARTIAL PASS"}[code]
    assert "2 ranks on CPU over 2 nodes" in record["scope"]
    assert not any("CUT OFF" in text for text in record["caveats"])
    asked_for = str(record["options"]["launcher"])
    assert asked_for == ("slurm" if place.kind == "slurm" else f"kubernetes:{place.pod}")
    rows = {check["id"]: check for phase in record["phases"] for check in phase["checks"]}
    nodes = {"preflight.nodes", "preflight.nodes_alike"}
    assert {rows[name]["outcome"] for name in nodes} == {"PASS"}
    assert nodes <= set(record["required"])
    check_on_one_and_two_nodes(run_root, record)
