"""One cluster for each worker that has tests of it, and what must be left of a test: nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs


@contextmanager
def running(folder: Path, nodes: int) -> Iterator[Cluster]:
    """A running cluster; skipped, with the reason, where Slurm is not installed."""
    if absent := missing_programs():
        pytest.skip(f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)")
    cluster = Cluster(folder, nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        patch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes."""
    with running(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """The cluster, of which a test must leave no job behind."""
    yield slurm
    assert slurm.jobs() == []


@pytest.fixture
def four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of four nodes for one test, which must leave no job behind."""
    with running(tmp_path_factory.mktemp("slurm"), nodes=4) as cluster:
        yield cluster
        assert cluster.jobs() == []
