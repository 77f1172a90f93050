"""A setting that only the caller's shell knows has no say in a run, and the caller is told so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runbook.engine
from runbook.cli import main
from runbook.engine.outputs import render
from runbook.engine.unused import UNUSED, unused_text, unused_variables
from runbook.errors import UsageError
from tests.cli.shell import inside
from tests.engine.toys import Toy, run

SHELL = {
    "NSA_OPT_FUSED": "1",
    "NCCL_DEBUG": "INFO",
    "NCCL_NET_GDR_LEVEL": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CONFIG": "x.yaml",
    "NSA_BUKET": "7",
}
PASSED_ON = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "lo", "PATH": "/bin"}
OTHERS = {"NSAFE": "1", "CONFIG_SHELL": "/bin/sh", "RUNBOOK_RUN_DIR": "/x"}
LINE = (
    "this run does not use these variables of the environment: "
    "CONFIG (the profile names the config, --profile FILE); "
    "NCCL_DEBUG, NSA_OPT_FUSED, PYTORCH_ALLOC_CONF (give it with --set NAME=value); "
    "NCCL_NET_GDR_LEVEL, TORCH_NCCL_DUMP_ON_TIMEOUT (give it as env of a profile, --profile FILE); "
    "NSA_BUKET (no such toggle)"
)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)


def test_what_is_named_and_how_it_is_given() -> None:
    names = unused_variables(SHELL | PASSED_ON | OTHERS, {})
    assert names == tuple(sorted(SHELL))
    assert unused_text(names) == LINE


def test_the_value_that_a_run_has_anyway_is_no_surprise() -> None:
    assert unused_variables({"NSA_OPT_FUSED": "1"}, {"NSA_OPT_FUSED": "1"}) == ()
    assert unused_variables({"NSA_OPT_FUSED": "1"}, {"NSA_OPT_FUSED": "0"}) == ("NSA_OPT_FUSED",)


@pytest.mark.parametrize("more", [(), ("--quiet",)])
def test_a_dry_run_says_it_and_plans_without_them(tmp_path: Path, more: tuple[str, ...]) -> None:
    words = ("run", "--dry-run", "--profile", "cpu", "--phase", "baseline", *more)
    ended = inside(*words, cwd=tmp_path, **SHELL)
    assert (ended.code, ended.err) == (0, f"warning: {LINE}\n")
    assert "NSA_OPT_FUSED=1" not in ended.out and "x.yaml" not in ended.out
    assert inside(*words, cwd=tmp_path).err == ""
    given = inside(*words, "--set", "NSA_OPT_FUSED=1", cwd=tmp_path, NSA_OPT_FUSED="1")
    assert given.err == "" and "NSA_OPT_FUSED=1" in given.out


def test_a_dry_run_for_machines_lists_them(tmp_path: Path) -> None:
    words = ("run", "--dry-run", "--json", "--profile", "cpu", "--phase", "baseline")
    ended = inside(*words, cwd=tmp_path, **SHELL)
    assert json.loads(ended.out)["unused_variables"] == sorted(SHELL)


@pytest.mark.usefixtures("exported")
def test_a_run_says_it_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert f"warning: {LINE}" in capsys.readouterr().err
        raise UsageError("the test stops here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runbook.engine, "run_plan", refuse)
    assert main(["run", "--quiet", "--phase", "baseline", "--profile", "cpu"]) == 2
    assert "the test stops here" in capsys.readouterr().err


@pytest.mark.usefixtures("exported")
def test_the_record_and_the_report_keep_it(tmp_path: Path) -> None:
    record, _ = run(tmp_path, Toy("baseline"))
    assert record.environment[UNUSED] == ", ".join(sorted(SHELL))
    report = render(record, "details").replace("\\", "")
    assert f"| {UNUSED} | {', '.join(sorted(SHELL))} |" in report
