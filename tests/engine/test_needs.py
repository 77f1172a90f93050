"""What launches need besides the program is looked at before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from runbook import EXTRAS, absent
from runbook.config.extends import load_preset
from runbook.config.setup import RunOptions, Setup
from runbook.engine.plan.prepare import needs_of, prepare
from runbook.errors import UsageError
from tests.cli.shell import inside
from tests.data.hub import serve, write_shards

# Nobody listens there.
NOWHERE = "http://127.0.0.1:9"
A100 = "a100x2_pcie4"
LOCAL = """\
extends: production
name: ours
phases:
  smoke: {dataset: local}
  extended: null
  production: null
"""


def planned(tmp_path: Path, *settings: str, profile: str = A100, **options: Any) -> Setup:
    words = {"plan": "production", "until": "smoke", "out": tmp_path, "profile": profile}
    return prepare(RunOptions(**words | options, settings=settings))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without extras."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in EXTRAS else find(name)
    )


@pytest.mark.usefixtures("plain")
def test_packages_and_the_hub_are_missed_at_once_each_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    lacks = needs_of(planned(tmp_path, "data.tokenizer=gpt2")).lacks
    assert [text.partition(";")[0] for text in lacks[:2]] == [
        "dataset fineweb_edu: the package datasets is not installed here",
        "dataset fineweb_edu: the package tiktoken is not installed here",
    ]
    assert "pip install 'nsa-runbook[fineweb]' (planned in smoke)" in lacks[0]
    assert "pip install 'nsa-runbook[gpt2]'" in lacks[1]
    assert lacks[2].startswith(f"{NOWHERE} does not answer (") and "HF_ENDPOINT" in lacks[2]


@pytest.mark.e2e
def test_a_batch_of_the_documents_is_read_as_the_loader_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="nsa-runbook[fineweb] is not installed")
    write_shards(tmp_path / "files", shards=2, documents=60)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serve(tmp_path / "files") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        found = needs_of(planned(tmp_path))
    assert (found.lacks, found.has) == ((), ("dataset fineweb_edu was read, tokenizer byte",))
    assert any(".parquet bytes=" in line for line in hub.asked)


@pytest.mark.e2e
def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    plan = tmp_path / "ours.yaml"
    plan.write_text(LOCAL)
    setup = planned(tmp_path, "data.local_path=/nowhere", plan=str(plan))
    (text,) = needs_of(setup).lacks
    assert text == (
        "dataset local /nowhere cannot be read: --local-path /nowhere: no such file or folder "
        "(planned in smoke)"
    )


def test_checkpoints_that_no_disk_holds(tmp_path: Path) -> None:
    """A model of a million layers; the smallest is at home everywhere."""
    settings = {"profile": "cpu", "until": "", "without_go": True}
    small = needs_of(planned(tmp_path / "new", **settings))
    assert small.lacks == () and small.has[-1].startswith("checkpoints: 0.0")
    huge = needs_of(planned(tmp_path / "new", "model.n_layers=1000000000", **settings))
    (text,) = huge.lacks
    assert "GiB for 3, " in text and "name another disk (--out)" in text
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("plain")
def test_a_plan_does_without_tensorboard_and_says_so(tmp_path: Path) -> None:
    setup = planned(tmp_path, profile="cpu", until="", without_go=True)
    boards = {one.phase: one.env.get("NSA_TB_DISABLE") for one in setup.planned}
    assert {boards[name] for name in ("sanity", "smoke", "production")} == {"1"}
    told = needs_of(setup).has[0]
    assert told == f"production without TensorBoard ({absent('tensorboard')})"
    with pytest.raises(UsageError, match="the package tensorboard is not installed here"):
        planned(tmp_path, "NSA_TB_DISABLE=0", profile="cpu", until="", without_go=True)


def test_a_launch_that_lacks_something_is_refused_and_its_dry_run_says_so(tmp_path: Path) -> None:
    words = ("launch", "--profile", A100, "--until", "smoke")
    done = inside(*words, cwd=tmp_path, HF_ENDPOINT=NOWHERE)
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert f"{NOWHERE} does not answer" in done.err and "nothing was started" in done.err
    shown = inside(*words, "--dry-run", cwd=tmp_path, HF_ENDPOINT=NOWHERE)
    assert shown.code == 0 and "# 3/3 smoke" in shown.out
    (line,) = (line for line in shown.out.splitlines() if line.startswith("# refused  "))
    assert f"{NOWHERE} does not answer" in line
    run = ("run", "--profile", A100, "--phase", "fineweb", "--dry-run")
    shown = inside(*run, cwd=tmp_path, HF_ENDPOINT=NOWHERE)
    assert shown.code == 0 and f"# lacks    {NOWHERE} does not answer" in shown.out


@pytest.mark.parametrize("name", ["production", "safe", "tuned", "unaccumulated", "validated"])
def test_a_preset_is_taken_by_the_commands_that_it_names(tmp_path: Path, name: str) -> None:
    for line in load_preset(name).lines:
        words = (*line.split()[1:], "--profile", A100, "--dry-run")
        done = inside(*words, cwd=tmp_path, HF_ENDPOINT=NOWHERE)
        assert (done.code, done.err) == (0, "")
        over = "# set      NSA_DISABLE_CSV_LOGS=0 (over preset production, which has 1: every"
        assert (over in done.out) == (name == "production")
