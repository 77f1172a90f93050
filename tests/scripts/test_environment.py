"""`make demo` takes a Python that works, and no environment that was left half made."""

from __future__ import annotations

import importlib.util
import os
import sys
import venv
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from phases.machine import _OLDEST_DRIVER
from tests.factory.programs import program

ROOT = Path(__file__).resolve().parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/environment.py, with installing left out: what it would install into is a list."""
    spec = importlib.util.spec_from_file_location("env_script", ROOT / "scripts/environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.installed = []
    monkeypatch.setattr(module, "install", lambda folder, dev: module.installed.append(dev))
    monkeypatch.setattr(module, "VENV", ("-m", "venv", "--without-pip"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    return module


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A pip without any setting."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return monkeypatch


def test_one_that_failed_halfway_is_made_anew(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(folder: Path, *, dev: bool) -> None:
        raise script.Refused("no network")

    folder = tmp_path / "venv"
    with monkeypatch.context() as failing:
        failing.setattr(script, "install", fail)
        assert script.main([str(folder)]) == 2
    assert "no network" in capsys.readouterr().err
    (folder / "left over").touch()
    assert script.main([str(folder)]) == 0
    assert "was not finished: it is made anew" in capsys.readouterr().out
    assert not (folder / "left over").exists() and script.installed == [False]


def test_another_python_takes_the_place_only_if_it_is_asked_for(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    config = folder / "pyvenv.cfg"
    config.write_text(config.read_text().replace(HERE, "3.10"))
    assert script.main([str(folder), "--keep"]) == 0
    assert capsys.readouterr().out == ""
    assert script.main([str(folder)]) == 0
    assert "has another Python than PYTHON: it is made anew" in capsys.readouterr().out
    assert HERE in config.read_text()


def test_what_is_no_environment_is_left_alone(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert script.main([str(tmp_path)]) == 2
    assert "VENV=FOLDER" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists() and script.installed == []


@pytest.mark.parametrize(
    ("version", "there", "told"),
    [
        ("3.10.13", "python3.12", ["give PYTHON=python3.12"]),
        ("3.15.0", "python3.12", ["give PYTHON=python3.12"]),
        ("3.10.13", "", ["\n  uv ", "\n  pyenv ", "make demo PYTHON="]),
    ],
)
def test_a_python_that_does_not_work_is_told_which_do(
    script: ModuleType, version: str, there: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.sys, "version", f"{version} (main)")
    monkeypatch.setattr(script.sys, "version_info", tuple(map(int, version.split("."))))
    monkeypatch.setattr(script.shutil, "which", lambda name: name == there)
    with pytest.raises(script.Refused) as refused:
        script.check_python()
    said = str(refused.value)
    assert f"is Python {version}; nsa-runbook runs on 3.11, 3.12, 3.13, 3.14" in said
    assert [text for text in told if text not in said] == []


_PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Aug  6 2025\nGCC version: 12.3.0\n"


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        ("580.95.05", "torch comes with its CUDA libraries"),
        ("535.161.08", "build for CUDA 12.6 does not"),
        ("470.256.02", "NVIDIA driver 470.256.02: torch from PyPI needs 580.65.06"),
    ],
)
def test_the_driver_is_looked_at_before_three_gigabytes_are_downloaded(
    script: ModuleType,
    tmp_path: Path,
    unset: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: str,
    told: str,
) -> None:
    (tmp_path / "version").write_text(_PROC.format(driver))
    unset.setattr(script, "DRIVER_FILE", tmp_path / "version")
    unset.setattr(script, "reachable", lambda url: True)
    asked = program(tmp_path / "installer", f'echo "$@" > {tmp_path / "words"}')
    with pytest.raises(script.Refused, match=told) if driver < "5" else nullcontext():
        script.install_torch([str(asked)])
        assert told in capsys.readouterr().out
    assert (tmp_path / "words").is_file() == driver.startswith("535")
    if driver.startswith("535"):
        pinned = script.CONSTRAINTS.read_text().split()[0] + "+cu126"
        words = (tmp_path / "words").read_text().split()
        assert words == ["--extra-index-url", script.CUDA_12_INDEX, pinned]


def test_the_oldest_drivers_are_those_of_preflight(script: ModuleType) -> None:
    found = {12: script.OLDEST_FOR_CUDA_12, 13: script.OLDEST_FOR_CUDA_13}
    assert found == {cuda: _OLDEST_DRIVER[cuda] for cuda in found}


@pytest.mark.parametrize(("prefix", "shared"), [(sys.base_prefix, "true"), ("/active", "false")])
def test_a_torch_that_is_there_is_shared_unless_an_active_environment_has_it(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, shared: str
) -> None:
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: name == "torch" or None)
    monkeypatch.setattr(script.sys, "prefix", prefix)
    assert script.main([str(tmp_path / "venv")]) == 0
    assert f"include-system-site-packages = {shared}" in (tmp_path / "venv/pyvenv.cfg").read_text()


def test_uv_installs_where_it_is_there_and_pip_was_told_nothing(
    script: ModuleType, tmp_path: Path, unset: pytest.MonkeyPatch
) -> None:
    uv = program(tmp_path / "uv", "true")
    unset.setenv("PATH", str(tmp_path))
    words = script.installer(sys.executable)
    assert words[0] == str(uv) and words[words.index("--python") + 1] == sys.executable
    unset.setenv("PIP_EXTRA_INDEX_URL", "https://packages.example/simple")
    assert script.installer(sys.executable)[0] == sys.executable
