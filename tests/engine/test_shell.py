"""What the shell has is honored and kept; what launches need is looked at before they start."""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runbook import EXTRAS, absent
from runbook.cli import main
from runbook.config.setup import RunOptions, Setup, setup_of_record
from runbook.engine.derive import render
from runbook.engine.plan.prepare import needs_of, prepare
from runbook.engine.run import run_setup
from runbook.errors import UsageError
from runbook.launch.observer import Observer
from tests.cli.shell import inside
from tests.data.hub import serve, write_shards
from tests.engine.toys import Toy, profile

EXPORTED = {"NSA_OPT_FUSED": "1", "NCCL_NET_GDR_LEVEL": "2", "NSA_DDP_BUCKET_MB": "0.25"}


def test_record_report_and_rerun_keep_them_with_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"profile": "cpu", "phases": "baseline", "out": tmp_path, "from_shell": EXPORTED}
    setup, toy = prepare(RunOptions(**words, settings=("train.seed=3",))), Toy("baseline")
    own = setup.profile.model_copy(update={"required": profile((toy,)).required})
    setup = replace(setup, phases=(toy,), profile=own)
    record = run_setup(setup, observer=Observer())
    assert record.settings == {**EXPORTED, "train.seed": "3"}
    assert {record.sources[name] for name in EXPORTED} == {"shell"}
    assert record.sources["train.seed"] == "--set"
    # The toy chooses a bucket, and a person gave one: that one was launched.
    assert record.exports["NSA_DDP_BUCKET_MB"] == "0.25"
    report = render(record, "md").replace("\\", "")
    assert "Set by hand: NSA_OPT_FUSED=1 (shell)" in report
    assert "NSA_DDP_BUCKET_MB=0.25 (shell, the profile has 0.5)" in report
    assert "settings changed (" in record.headline
    line = record.invocation.line(["baseline"])
    assert "--set NSA_OPT_FUSED=1" in line and "--set NCCL_NET_GDR_LEVEL=2" in line
    again = setup_of_record(record, profile=setup.profile)
    assert (again.settings.texts(), again.settings.sources) == (record.settings, record.given_by)

    monkeypatch.setenv("NSA_OPT_FUSED", "0")
    monkeypatch.setenv("NSA_ACCUM", "2")
    main(["run", "--resume", str(tmp_path / record.run_id)])
    said = capsys.readouterr().err
    assert "this run keeps the variables that it began with" in said


def test_another_config_is_another_configuration(tmp_path: Path) -> None:
    plain = prepare(RunOptions(profile="a100x2_pcie4", phases="baseline"))
    tuned = "configs/m7c_125m_2xa100_production_tuned.yaml"
    options = RunOptions(profile="a100x2_pcie4", phases="baseline", from_shell={"CONFIG": tuned})
    setup = prepare(options)
    assert setup.profile_sha256() != plain.profile_sha256()
    assert {launch.config for launch in setup.planned} == {tuned}
    assert [launches for _, launches in prepare(options).plan()]


SETTINGS = ("NSA_DDP_COMPRESS=off", "train.lr=1e-3", "train.seed=7")


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": SETTINGS, "gpu_hour_price": 2.5},
        {"protocol": "launches", "steps_scale": 0.5, "aa": True, "seed": 3},
        {"profile": "./our machine.yaml", "settings": SETTINGS[:1]},
    ],
    ids=["settings", "protocol", "own"],
)
def test_the_line_plans_the_same_launches(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word, in another folder; a profile of one's own is named by its file."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "our machine.yaml"
    path.write_text("extends: cpu\nname: ours\n", encoding="utf-8")
    words = {"phases": "bucket_sweep", "profile": "cpu", "out": tmp_path / "runs"}
    setup = prepare(RunOptions(**words | changes))
    wanted = [launch.model_dump(mode="json") for launch in setup.phases[0].plan(setup.context({}))]
    line = setup.context({}).rerun("bucket_sweep")
    assert line.startswith("runbook run ") and f"--out {tmp_path / 'runs'}" in line
    assert (shlex.quote(str(path)) in line) is ("profile" in changes)
    done = inside(*shlex.split(line)[1:], "--dry-run", "--json", cwd=Path("/"))
    assert done.code == 0, done.err
    (got,) = (phase["launches"] for phase in json.loads(done.out)["phases"])
    assert [{key: one[key] for key in wanted[0]} for one in got] == wanted


# Nobody listens there.
NOWHERE = "http://127.0.0.1:9"
A100 = "a100x2_pcie4"


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
def test_a_preset_is_taken_by_run_and_launch(tmp_path: Path, name: str) -> None:
    """Two phases compare what `safe` fixes, so it is for the others."""
    for line in ("run --phase baseline" if name == "safe" else "run", "launch"):
        words = (*line.split(), "--preset", name, "--profile", A100, "--dry-run")
        done = inside(*words, cwd=tmp_path, HF_ENDPOINT=NOWHERE)
        assert (done.code, done.err) == (0, "")
        over = "# set      NSA_DISABLE_CSV_LOGS=0 (over preset production, which has 1: every"
        assert (over in done.out) == (name == "production")
