"""A directory serves one launch; its files are whole or absent, and hold no secret."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from nsa.launch.envfile import redact
from nsa.launch.output import LineFile, RecordWriteError, plain, write_json
from nsa.launch.process import claim, leftovers, link_latest
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


def test_json_holds_no_bare_nan() -> None:
    assert plain({"a": float("nan"), "b": -math.inf, "c": 1.5, "d": None}) == {
        "a": "nan",
        "b": "-inf",
        "c": 1.5,
        "d": None,
    }


def test_line_files_are_never_shared(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    LineFile(path).append("one")
    with pytest.raises(FileExistsError):
        LineFile(path)
    assert path.read_text() == "one\n"


def test_a_full_disk_is_named() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    file = LineFile.__new__(LineFile)
    file.path, file._fd = full, os.open(full, os.O_WRONLY)
    with pytest.raises(RecordWriteError, match="cannot write /dev/full: No space left on device"):
        file.append("row")
    os.close(file._fd)


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "no_such_folder" / "env.json"
    with pytest.raises(RecordWriteError, match=r"env\.json"):
        write_json(path, {})
    write_json(tmp_path / "env.json", {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["env.json"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("--local-path=/data/x", "--local-path=/data/x"),
        ("API_KEY=abc123", "API_KEY=[redacted]"),
        ("https://user:pw@host/x", "https://[redacted]@host/x"),
        ("hf_abcdefghij123", "[redacted]"),
        ("HF_AUTH=abc123", "HF_AUTH=[redacted]"),
        ("data.tokenizer=byte", "data.tokenizer=byte"),
        ("--auth=abc123", "--auth=[redacted]"),
        ("token=a b", "token=[redacted] b"),
    ],
)
def test_secrets_are_redacted(text: str, clean: str) -> None:
    assert redact(text) == clean
