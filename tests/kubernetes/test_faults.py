"""Jobs whose pods fail in every way: noticed, named with their node, and nothing left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.folder.launch.evidence import read_launch
from runbook.launch import LaunchOptions, StopRequest, adopt_launch
from runbook.launch.nodes.files import JOB_JSON, last_state
from runbook.process.reaper import carriers
from runbook.records import LaunchStatus
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.helpers import Notes, launcher, run, two_ranks
from tests.launch.helpers import At
from tests.shared import crowded

LONG = pytest.mark.slow


def test_a_healthy_launch_leaves_what_one_machine_leaves(
    cluster: Cluster, pod: Path, tmp_path: Path
) -> None:
    launch = two_ranks("--dt", "0.1", steps=20)  # long enough for its agent to see it
    result = run(launch, pod, tmp_path)
    assert (result.status, result.exit_code, result.cause) == (LaunchStatus.COMPLETED, 0, "")
    told = [(end.rank, end.code, end.steps_done, end.node) for end in result.ranks]
    assert told == [(0, 0, 20, "k0"), (1, 0, 20, "k1")]
    evidence = read_launch(tmp_path, launch, result)
    assert evidence.problems == ()
    assert evidence.devices_before and evidence.kernel_log and evidence.load
    kept = json.loads((tmp_path / "kubernetes_nodes.json").read_text())["nodes"]
    assert kept == list(cluster.names)
    for index, name in enumerate(kept):
        said = last_state(tmp_path / launch.run_dir / "nodes" / name)
        assert said is not None and list(said.ranks) == [index]


@LONG
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("sigkill", LaunchStatus.CRASHED, "rank 1 was ended by SIGKILL"),
        ("hang", LaunchStatus.HUNG, "hang: rank 1 silent for"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_node(
    cluster: Cluster, pod: Path, tmp_path: Path, fault: str, status: LaunchStatus, words: str
) -> None:
    result = run(two_ranks("--fault", fault), pod, tmp_path)
    assert (result.status, result.culprit_rank) == (status, 1), result
    assert words in result.cause and "rank 1 ran on node k1" in result.cause


def deletes(cluster: Cluster) -> None:
    with cluster.lock:
        (job,) = cluster.all("jobs")
        cluster.delete("jobs", job["metadata"]["name"], {})


@LONG
@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        (
            lambda cluster: cluster.evict("k1", message="drained"),
            LaunchStatus.PREEMPTED,
            "on node k1 was taken away by Kubernetes: EvictionByEvictionAPI: drained",
        ),
        (
            lambda cluster: cluster.evict("k1", "PreemptionByScheduler"),
            LaunchStatus.PREEMPTED,
            "on node k1 was taken away by Kubernetes: PreemptionByScheduler",
        ),
        (
            lambda cluster: cluster.evict("k1", "DeletionByTaintManager"),
            LaunchStatus.HARDWARE_ERROR,
            "on node k1 lost its node: DeletionByTaintManager",
        ),
        (
            lambda cluster: cluster.fail("k1", reason="Evicted"),
            LaunchStatus.PREEMPTED,
            "taken away by Kubernetes: Evicted: The node was low on resource",
        ),
        (
            lambda cluster: cluster.fail("k1", container="OOMKilled"),
            LaunchStatus.OUT_OF_MEMORY,
            "on node k1 was killed for memory (OOMKilled)",
        ),
        (deletes, LaunchStatus.PREEMPTED, "was deleted in Kubernetes by somebody else"),
    ],
)
def test_what_happens_to_a_pod_is_told_apart(
    cluster: Cluster,
    pod: Path,
    tmp_path: Path,
    act: Callable[[Cluster], None],
    status: LaunchStatus,
    words: str,
) -> None:
    result = run(two_ranks(steps=2000), pod, tmp_path, observer=At(3, lambda _: act(cluster)))
    assert result.status is status, result
    assert words in result.cause
    assert result.node == ("k1" if status is LaunchStatus.HARDWARE_ERROR else "")


@LONG
def test_a_node_that_goes_down_is_named(cluster: Cluster, pod: Path, tmp_path: Path) -> None:
    off = At(3, lambda _: cluster.power_off("k1"))
    result = run(two_ranks(steps=5000), pod, tmp_path, observer=off)
    cluster.power_on("k1")
    assert result.status is LaunchStatus.HARDWARE_ERROR, result
    assert result.cause.startswith("node k1 is lost: nothing heard from it for ")
    assert "Kubernetes calls it Ready=Unknown, NodeStatusUnknown" in result.cause
    assert result.node == "k1"
    deadline = time.monotonic() + 20  # the kubelet removes it once it is back
    while cluster.left() and time.monotonic() < deadline:
        time.sleep(0.1)


@LONG
def test_a_stop_request_ends_everything_within_five_seconds(
    cluster: Cluster, pod: Path, tmp_path: Path
) -> None:
    stop, asked = StopRequest(), []

    def request(_: object) -> None:
        asked.append(time.monotonic())
        stop.request("SIGINT")

    result = run(two_ranks(steps=2000), pod, tmp_path, observer=At(3, request), stop=stop)
    assert result.status is LaunchStatus.INTERRUPTED
    assert time.monotonic() - asked[0] < crowded(5)


@LONG
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda cluster, pod: cluster.cordoned.add("k1"),
            "Unschedulable: 0/2 nodes are available: 1 unschedulable",
        ),
        (
            lambda cluster, pod: pod.write_text(pod.read_text().replace("registry", "absent")),
            "ImagePullBackOff: Back-off pulling absent.example/nsa-runbook:1",
        ),
        (lambda cluster, pod: cluster.quota.add("pods"), "FailedCreate: exceeded quota: gpus"),
    ],
)
def test_a_job_that_never_starts_is_refused_in_the_clusters_words(
    cluster: Cluster,
    pod: Path,
    tmp_path: Path,
    change: Callable[[Cluster, Path], object],
    words: str,
) -> None:
    change(cluster, pod)
    notes = Notes()
    waits = launcher(pod, tmp_path, queue_s=8, notes=notes)
    result = run(two_ranks(), pod, tmp_path, launcher=waits)
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR
    assert "never started" in result.cause and "the limit is 8 s (--queue-s)" in result.cause
    assert words in result.cause
    assert any("waits in the queue" in text for text in notes.said)


@pytest.mark.parametrize("kind", ["jobs", "services"])
def test_what_the_cluster_refuses_is_told_in_its_words(
    cluster: Cluster, pod: Path, tmp_path: Path, kind: str
) -> None:
    cluster.quota.add(kind)
    result = run(two_ranks(), pod, tmp_path)
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR
    assert result.cause.startswith(f"Kubernetes refused the {kind[:-1].title()}: ")
    assert "exceeded quota: gpus" in result.cause
    deadline = time.monotonic() + crowded(10)  # a job that lost its Service is removed at once
    while cluster.left() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_an_image_without_this_python_is_told(
    cluster: Cluster, pod: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/absent/python")
    result = run(two_ranks(), pod, tmp_path)
    assert result.status is LaunchStatus.ENVIRONMENT_ERROR
    assert "2 of its 2 nodes did not say how" in result.cause
    assert result.cause.endswith("a pod says: StartError: exec: no such file or directory")


HARNESS = """
import sys
from pathlib import Path
from runbook.records import Launch
from tests.kubernetes.helpers import run
run(Launch.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
"""


@LONG
def test_a_harness_that_is_killed_finds_its_job_again(
    cluster: Cluster, pod: Path, tmp_path: Path
) -> None:
    launch = two_ranks("--dt", "0.05", steps=60)
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, launch.model_dump_json(), str(pod), str(tmp_path)],
        cwd=Path(__file__).parents[2],
    )
    run_dir = tmp_path / launch.run_dir
    deadline = time.monotonic() + 120
    while not (run_dir / "training.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    token = json.loads((run_dir / JOB_JSON).read_text())["run_token"]
    notes = Notes()
    how = LaunchOptions(
        run_root=tmp_path,
        observer=notes,
        retry=False,
        launcher=launcher(pod, tmp_path, notes=notes),
    )
    result = adopt_launch(launch, how)
    assert result is not None and result.status is LaunchStatus.COMPLETED, result
    said = f"one: job runbook-{token} outlived its harness and is watched again"
    assert notes.said == [said]
    assert [e.steps_done for e in result.ranks] == [60, 60]
    assert carriers(token) == []
    # Its end was seen, and a job of that name is no longer there.
    (run_dir / "result.json").unlink()
    (run_dir / "nodes/k0/node.jsonl").write_text("")
    assert adopt_launch(launch, how) is None
