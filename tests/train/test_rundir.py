"""A directory serves one launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.settings import ConfigError
from nsa.train.rundir import claim, leftovers


@pytest.mark.parametrize(
    "name", ["training.csv", ".HALT", ".ENOUGH", "heartbeat_rank0.jsonl", "env.json"]
)
def test_a_directory_with_traces_of_a_launch_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"belongs to an earlier launch"):
        claim(tmp_path, 2)


def test_the_harness_own_files_are_no_traces(tmp_path: Path) -> None:
    for name in ("launch.json", "console.log", "heartbeat_rank1.jsonl"):
        (tmp_path / name).touch()
    assert leftovers(tmp_path, world_size=2) == []
    assert leftovers(tmp_path, world_size=1) == ["heartbeat_rank1.jsonl"]
