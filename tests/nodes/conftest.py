"""Clusters for the tests that need one, and what must be left of a test: nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nodes import kubernetes, slurm
from tests.nodes.helpers import Place


@contextmanager
def slurm_of(folder: Path, nodes: int) -> Iterator[slurm.Cluster]:
    """A running cluster; skipped, with the reason, where Slurm is not installed."""
    if absent := slurm.missing_programs():
        pytest.skip(f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)")
    cluster = slurm.Cluster(folder, nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        patch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """One of two nodes for each worker that has tests of it."""
    with slurm_of(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def in_slurm(two_nodes: slurm.Cluster) -> Iterator[Place]:
    """The cluster, of which a test must leave no job behind."""
    yield Place(kind="slurm", cluster=two_nodes)
    assert two_nodes.left() == []


@pytest.fixture
def in_kubernetes(tmp_path_factory: pytest.TempPathFactory, pod: Path) -> Iterator[Place]:
    """Two nodes, of which a test must leave no job and no pod behind."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (apt-get install kubernetes-client, or Google's)")
    made = kubernetes.Cluster(tmp_path_factory.mktemp("kubernetes"))
    with pytest.MonkeyPatch.context() as patch:
        made.up()
        for name, value in made.environment.items():
            patch.setenv(name, value)
        try:
            yield Place(kind="kubernetes", cluster=made, pod=pod)
            assert made.left() == []
        finally:
            made.down()


@pytest.fixture(params=[pytest.param("slurm", marks=pytest.mark.slow), "kubernetes"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each cluster in turn."""
    found: Place = request.getfixturevalue(f"in_{request.param}")
    return found


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """A pod file that shares the test's folder."""
    path = tmp_path / "pod.yaml"
    text = Path(__file__).with_name("pod.yaml").read_text("utf-8")
    path.write_text(text.replace("SHARED", str(tmp_path)))
    return path
