"""`latest` beside the runs leads to the newest launch, and nothing that reads runs minds it."""

from __future__ import annotations

from pathlib import Path

from runbook.folder.manifest import check_manifest
from runbook.launch.observer import Observer
from runbook.tools.inspect.folder import inspect_path
from tests.cli.shell import inside
from tests.engine.toys import Toy, run, verify


class Looks(Observer):
    """Where `latest` leads as each launch makes its first step."""

    def __init__(self, out: Path) -> None:
        self.link, self.seen = out / "latest", []  # type: ignore[var-annotated]

    def launch_finished(self, launch: object, result: object) -> None:
        del launch, result
        self.seen.append(self.link.resolve())


def test_it_leads_to_each_launch_and_is_no_part_of_a_run(tmp_path: Path) -> None:
    looks, toys = Looks(tmp_path), (Toy("baseline", count=2), Toy("nvtx"))
    _, folder = run(tmp_path, *toys, observer=looks)
    wanted = [folder / name for name in ("baseline/run1", "baseline/run2", "nvtx/run1")]
    assert looks.seen == wanted
    assert (tmp_path / "latest" / "heartbeat_rank0.jsonl").is_file()
    assert check_manifest(folder) == []
    assert verify(folder, *toys).differences == ()
    assert len(inspect_path(tmp_path).directories) == len(wanted), "each launch once"
    assert str(folder) in inside("report", "--out", str(tmp_path), cwd=tmp_path).out


def test_a_file_of_that_name_stays_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("mine")
    record, _ = run(tmp_path, Toy("baseline"))
    assert record.verdict == "GO" and (tmp_path / "latest").read_text() == "mine"
