"""What Kubernetes is asked for and who refuses it, and what is read of its answers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.launch.kubernetes import JobState
from runbook.launch.kubernetes.manifests import LABEL, Request, read_pod
from runbook.launch.nodes.files import Job
from runbook.records import LaunchStatus
from tests.cli.shell import inside, runbook
from tests.factory.tables import rows, table
from tests.nodes.helpers import Place, two_ranks

# The oldest and the newest one whose schemas are installed, and one between.
VERSIONS = ("1.25", "1.32", "1.37")
GPUS = """
extends: a100x2_pcie4
name: pair
title: two nodes of two A100
ranks: 4
workload: {global_batch: 4}
phases: {baseline: {config_overrides: {train.batch_size: 4}}}
hardware: {nodes: 2, interconnect: infiniband}
"""


def request(pod: Path) -> Request:
    return Request(pod=read_pod(pod), gpus=0, queue_s=60)


def dry_run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The manifests that a dry run prints for the first launch."""
    launcher = ("--launcher", "kubernetes:pod.yaml", "--dry-run")
    done = inside("run", *words, *launcher, cwd=folder)
    assert done.code == 0, done.err
    text = done.out.partition("kubectl apply -f - <<'JOB'\n")[2].partition("\nJOB\n")[0]
    assert "&id" not in text
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_dry_run_prints_what_kubectl_and_the_schemas_accept(
    in_kubernetes: Place, pod: Path, tmp_path: Path, nodes: int
) -> None:
    found = dry_run(tmp_path, "--phase", "baseline", "--profile", "cpu", "--nodes", str(nodes))
    assert [one["kind"] for one in found] == ["Job", "Service"][:nodes]
    for document in found:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    done = subprocess.run(
        ["kubectl", "apply", "--dry-run=client", "-f", "-"],
        input=yaml.safe_dump_all(found),
        capture_output=True,
        text=True,
    )
    made = ["job.batch/runbook created (dry run)", "service/runbook created (dry run)"]
    assert (done.returncode, done.stdout.splitlines()) == (0, made[:nodes]), done.stderr


def part_of(found: Any, wanted: Any) -> Any:
    """What a document says where the other one says something."""
    if isinstance(wanted, dict):
        return {key: part_of(found.get(key), wanted[key]) for key in wanted}
    if isinstance(wanted, list) and len(wanted) == len(found):
        return [part_of(one, other) for one, other in zip(found, wanted, strict=True)]
    return found


def test_the_job_has_what_the_pod_file_has_and_what_a_launch_needs(
    pod: Path, tmp_path: Path
) -> None:
    (tmp_path / "gpus.yaml").write_text(GPUS)
    job, service = dry_run(
        tmp_path, "--phase", "baseline", "--profile", "gpus.yaml", "--nodes", "2"
    )
    (wanted,) = rows(__file__, "job_and_service")
    assert part_of({"job": job, "service": service}, wanted) == wanted
    assert (
        job["spec"]["activeDeadlineSeconds"] > 3600 and job["spec"]["ttlSecondsAfterFinished"] > 0
    )
    labels = {"team": "nsa", LABEL: "runbook"}
    template = job["spec"]["template"]
    assert job["metadata"]["labels"] == template["metadata"]["labels"] == labels
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = template["spec"]["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts[str(tmp_path)]]["persistentVolumeClaim"] == {"claimName": "shared"}
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["HF_HOME"] == "/hf" and "NSA_DDP_BUCKET_MB" in environment
    words = container["command"]
    assert words[0] == "torchrun" and "--nnodes=2" in words
    assert "--rdzv-endpoint=runbook-0.runbook:29400" in words


def affinity(pod: Path, *on: str) -> dict[str, Any]:
    document = request(pod).job(two_ranks(), "x", ["true"], {}, on)
    kubernetes_validate.validate(document, "1.32", strict=True)
    found: dict[str, Any] = document["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    return found


def test_the_nodes_of_a_run_are_kept(pod: Path) -> None:
    """A term by the name of a node may hold one name: the API server refuses more."""
    (terms,) = affinity(pod, "a", "b").values()
    fields = [term["matchFields"] for term in terms["nodeSelectorTerms"]]
    assert [[one["values"] for one in field] for field in fields] == [[["a"]], [["b"]]]
    # Of nodes that are not known yet the scheduler chooses, beside those that are.
    assert list(affinity(pod, "a")) == ["preferredDuringSchedulingIgnoredDuringExecution"]


@table(__file__, "pods_that_do_not_fit")
def test_a_pod_that_does_not_fit_is_refused(pod: Path, old: str, new: str, words: str) -> None:
    text = pod.read_text()
    assert old in text
    pod.write_text(text.replace(old, new, 1))
    options = RunOptions(
        phases="baseline", profile="cpu", launcher=f"kubernetes:{pod}", out=pod.parent / "out"
    )
    with pytest.raises(UsageError) as refused:
        prepare(options)
    assert words in str(refused.value) and "pod.yaml" in str(refused.value)


def test_what_is_missing_here_is_told_before_anything_starts(
    in_kubernetes: Place, tmp_path: Path
) -> None:
    words = ("--phase", "baseline", "--profile", "cpu", "--launcher", "kubernetes:pod.yaml")
    in_kubernetes.cluster.denied |= {"create jobs", "list pods"}
    done = runbook("run", *words, cwd=tmp_path)
    assert done.code == 2
    for text in (
        "you may not create jobs.batch in the namespace training",
        "you may not list pods in the namespace training",
    ):
        assert text in done.err
    assert "you may not delete" not in done.err
    assert not (tmp_path / "artifacts").exists()
    assert runbook("run", *words, cwd=tmp_path, KUBECONFIG="/dev/null").code == 2


def a_pod(state: dict[str, Any], conditions: Sequence[Any] = (), **status: str) -> dict[str, Any]:
    told = {"containerStatuses": [{"name": "trainer", "state": state}], "conditions": conditions}
    spec = {"containers": [{"name": "trainer"}], "nodeName": "k1"}
    return {"metadata": {"name": "a"}, "spec": spec, "status": {**told, **status}}


def told(conditions: list[dict[str, str]], pods: list[dict[str, Any]], **more: Any) -> JobState:
    job = {"metadata": {}, "status": {"conditions": conditions}}
    made = tuple(a_pod(**pod) for pod in pods)
    return JobState(**({"job": job, "pods": made, "nodes": 1} | more))


@table(__file__, "jobs_in_kubernetes")
def test_a_job_as_the_cluster_tells_it(
    job: dict[str, Any], waits: bool, over: bool, why: str
) -> None:
    state = told(**{"conditions": [], "pods": [], **job})
    assert (state.waits, state.over, state.why) == (waits, over, why)


@table(__file__, "ends_in_kubernetes")
def test_what_the_end_of_a_job_means(
    reason: str, pods: list[dict[str, Any]], status: str, words: str
) -> None:
    about = Job(run_token="ab", nodes=2, nproc=2, argv=("x",))
    over = {"gone": False, "silent": "1 of its 2 nodes"}
    failed = [{"type": "Failed", "status": "True", "reason": reason, "message": ""}]
    state = told(failed, pods, logs=lambda name: f"{name} has no torch")
    end = state.ended(about, Path("/runs/x"), **over)
    assert end.status == status and words in end.cause
    assert end.node == ("k1" if status == "hardware_error" else "")
    # The cluster no longer knows it.
    gone = told([], [], job={}).ended(about, Path("/runs/x"), **over)
    assert gone.status is LaunchStatus.PREEMPTED
