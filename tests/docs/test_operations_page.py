"""Every command on the operator's page is one that this program has, with toggles that it knows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import runbook as package
from nsa.toggles import TOGGLES
from runbook.cli import COMMANDS, main
from runbook.config import load_profile
from runbook.config.presets import load_preset
from runbook.engine.options import RunOptions, prepare
from runbook.records import ArmSchedule

PAGE = Path(package.__file__).resolve().parent.parent / "docs" / "operations.md"
TEXT = PAGE.read_text(encoding="utf-8")
LINES = sorted(set(re.findall(r"(?:`|^)(runbook [^`#\n]+?)\s*(?:`|#|$)", TEXT, re.MULTILINE)))
# What makes the difference between a line that starts something and one that only plans.
NO_ARMS = ArmSchedule(settings={}, rounds=(), steps=1, warmup_steps=0)
STARTING = ("--dry-run", "--measure")
GOES_ON = ("--resume", "--failed")
RUNS = [
    line
    for line in LINES
    if line.startswith("runbook run") and not any(flag in line for flag in GOES_ON)
]


def test_the_page_has_commands() -> None:
    assert len(RUNS) >= 10


@pytest.mark.parametrize("line", LINES)
def test_the_command_exists(line: str) -> None:
    word = shlex.split(line)[1]
    assert word in COMMANDS or word.startswith("--")


@pytest.mark.parametrize("line", RUNS)
def test_the_line_is_accepted(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(line)[1:] if word not in STARTING]
    assert main([*words, "--dry-run", "--profile", "a100x2_pcie4"]) == 0
    assert capsys.readouterr().err == ""


def test_a_wrong_line_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--set", "NSA_DDP_STATIC_GRAF=0", "--dry-run", "--profile", "cpu"]) == 2
    assert "NSA_DDP_STATIC_GRAPH" in capsys.readouterr().err


def test_every_toggle_on_the_page_exists() -> None:
    named = set(re.findall(r"\bNSA_[A-Z0-9_]+\b", TEXT))
    assert named <= set(TOGGLES)
    assert len(named) > 10


def test_the_page_stays_one_page() -> None:
    assert len(TEXT.splitlines()) < 160


def test_what_is_measured_is_what_is_launched() -> None:
    """The documented launch, the preset, the profile, and what a GO of it exports are one."""
    block = re.findall(r"^export (.+)$", TEXT, re.MULTILINE)
    documented = dict(word.split("=", 1) for line in block for word in shlex.split(line))
    profile = load_profile("a100x2_pcie4")
    assert documented == profile.variables == load_preset("validated").variables
    setup = prepare(RunOptions(profile="a100x2_pcie4"))
    assert setup.exports == documented
    launched = {launch.config for launch in setup.planned if launch.kind == "trainer"}
    assert launched == set(re.findall(r"torchrun .*--config (\S+)", TEXT))
    trained = [one for one in setup.planned if one.argv[0] == "torchrun" and one.kind == "trainer"]
    for launch in trained:
        own = {name for arm in (launch.schedule or NO_ARMS).settings.values() for name in arm}
        kept = {name: value for name, value in documented.items() if name not in own}
        assert kept.items() <= launch.env.items(), launch.name
