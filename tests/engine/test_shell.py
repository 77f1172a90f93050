"""What the caller's shell has is honored, listed before the start and kept; never ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.config.setup import RunOptions, Setup, setup_of_record
from runbook.engine.derive import render
from runbook.engine.plan.prepare import prepare
from runbook.engine.run import run_setup
from runbook.errors import UsageError
from runbook.launch.observer import Observer
from runbook.records import RunRecord
from tests.cli.shell import inside
from tests.engine.toys import Toy, profile

EXPORTED = {"NSA_OPT_FUSED": "1", "NCCL_NET_GDR_LEVEL": "2", "NSA_DDP_BUCKET_MB": "0.25"}
WORDS = ("--profile", "cpu", "--phase", "baseline")


def test_a_dry_run_for_machines_names_the_source_of_every_variable(tmp_path: Path) -> None:
    ended = inside("run", "--dry-run", "--json", *WORDS, cwd=tmp_path, **EXPORTED)
    document = json.loads(ended.out)
    assert document["settings"] == EXPORTED
    assert document["sources"]["NSA_OPT_FUSED"] == "shell"
    assert document["sources"]["NSA_DDP_COMPRESS"] == "profile cpu"
    for launch in document["phases"][0]["launches"]:
        assert EXPORTED.items() <= launch["env"].items()


def test_a_run_lists_them_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(setup: Setup, **_: object) -> None:
        assert "set NSA_OPT_FUSED=1 (shell)" in capsys.readouterr().err
        raise UsageError("the test stops here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_OPT_FUSED", "1")
    monkeypatch.setattr("runbook.engine.run.run_setup", refuse)
    assert main(["run", *WORDS]) == 2


def kept(tmp_path: Path) -> tuple[RunRecord, Setup]:
    """A finished run of a toy under a shell's variables."""
    setup = prepare(RunOptions(profile="cpu", phases="baseline", out=tmp_path, from_shell=EXPORTED,
                               settings=("train.seed=3",)))  # fmt: skip
    toy = (Toy("baseline"),)
    required = profile(toy).required
    setup = replace(
        setup, phases=toy, planned=(),
        profile=setup.profile.model_copy(update={"required": required}),
    )  # fmt: skip
    record = run_setup(setup, observer=Observer())
    return record, setup


def test_record_report_and_rerun_keep_them_with_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, setup = kept(tmp_path)
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
    assert (again.given, again.settings.sources) == (record.settings, record.given_by)

    monkeypatch.setenv("NSA_OPT_FUSED", "0")
    main(["run", "--resume", str(tmp_path / record.run_id)])
    said = capsys.readouterr().err
    assert "this run keeps the variables that it began with: NSA_OPT_FUSED=0 here, 1 in" in said
    assert "NCCL_NET_GDR_LEVEL is not set here, 2 in the run" in said


def test_another_config_is_another_configuration(tmp_path: Path) -> None:
    plain = prepare(RunOptions(profile="a100x2_pcie4", phases="baseline"))
    tuned = "configs/m7c_125m_2xa100_production_tuned.yaml"
    options = RunOptions(profile="a100x2_pcie4", phases="baseline", from_shell={"CONFIG": tuned})
    setup = prepare(options)
    assert setup.profile_sha256() != plain.profile_sha256()
    assert {launch.config for launch in setup.planned} == {tuned}
    assert [launches for _, launches in prepare(options).plan()]
