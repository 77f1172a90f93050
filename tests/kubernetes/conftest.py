"""A cluster for each test that needs one, and what must be left of a test: nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import Cluster


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, of which a test must leave no job, pod or service behind."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (apt-get install kubernetes-client, or Google's)")
    made = Cluster(tmp_path_factory.mktemp("kubernetes"))
    with pytest.MonkeyPatch.context() as patch:
        made.up()
        for name, value in made.environment.items():
            patch.setenv(name, value)
        try:
            yield made
            assert made.left() == []
        finally:
            made.down_all()


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """A pod file that shares the test's folder."""
    path = tmp_path / "pod.yaml"
    path.write_text(POD.format(shared=tmp_path))
    return path


POD = """
apiVersion: v1
kind: Pod
metadata:
  namespace: training
  labels: {{team: nsa}}
spec:
  nodeSelector: {{pool: gpu}}
  containers:
  - name: trainer
    image: registry.example/nsa-runbook:1
    env: [{{name: HF_HOME, value: /hf}}]
    volumeMounts: [{{name: shared, mountPath: {shared}}}]
  volumes:
  - name: shared
    persistentVolumeClaim: {{claimName: shared}}
"""
