"""A directory serves one launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.launch.rundir import claim, leftovers, link_latest
from nsa.settings import ConfigError


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


def test_two_links_lead_to_the_newest_launch_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` beside it, and that of the folder in which the harness has its runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        run_dir = tmp_path / "artifacts/prod" / name
        run_dir.mkdir(parents=True)
        link_latest(run_dir, "artifacts/prod")
        for link in ("artifacts/latest", "artifacts/prod/latest"):
            assert (tmp_path / link).resolve() == run_dir
    link_latest(tmp_path / "artifacts/prod/first", str(tmp_path / "artifacts/prod"))
    assert (tmp_path / "artifacts/latest").resolve().name == "second"


def test_somebodys_file_with_the_name_of_the_link_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "artifacts/prod/first"
    run_dir.mkdir(parents=True)
    (tmp_path / "artifacts/latest").write_text("mine")
    link_latest(run_dir, "artifacts/prod")
    assert (tmp_path / "artifacts/latest").read_text() == "mine"
    assert sorted(path.name for path in run_dir.parent.parent.iterdir()) == ["latest", "prod"]
