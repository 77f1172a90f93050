"""phases, profiles, toggles and schema: for people as text, for machines as JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.config import registry
from runbook.config.load import load_profile, profile_names
from tests.cli.shell import inside, runbook
from tests.factory.programs import program

PHASES = registry.phases()


def test_phases_for_machines(tmp_path: Path) -> None:
    ended = inside("phases", "--json", cwd=tmp_path)
    assert ended.err == ""
    rows = json.loads(ended.out)["phases"]
    # docs/phases.md holds the names and their order.
    assert [row["name"] for row in rows] == list(PHASES)
    assert [row["name"] for row in rows if row["optional"]] == [
        "fineweb",
        "regression",
    ]
    reads = {row["name"]: row["reads"] for row in rows}
    assert {"bucket_sweep", "fused_adamw"} <= set(reads["long_run"])
    assert all(row["question"].endswith("?") and row["source"] for row in rows)


def test_profiles_and_the_one_that_auto_takes(tmp_path: Path) -> None:
    ended = inside("profiles", cwd=tmp_path)
    assert ended.code == 0, ended.err
    names = [line.split()[0] for line in ended.out.splitlines()[1:-1]]
    assert names == list(profile_names())
    document = json.loads(inside("profiles", "--json", cwd=tmp_path).out)
    assert [row["name"] for row in document["profiles"]] == names
    chosen = document["auto"]["name"]
    assert ended.out.count("*") == 2
    assert f"{chosen} *" in ended.out
    assert ended.out.endswith(f"* what --profile auto chooses here: {document['auto']['reason']}\n")


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_shows_every_limit_with_its_source(tmp_path: Path, name: str) -> None:
    profile = load_profile(name)
    ended = inside("profiles", name, cwd=tmp_path)
    assert ended.code == 0
    for limit_name, limit in profile.limits.items():
        line = next(line for line in ended.out.splitlines() if line.split()[:1] == [limit_name])
        assert f"{limit.value:g}" in line and line.endswith(limit.source)
    for check in profile.required:
        assert f"\n{check}" in ended.out


def test_a_profile_for_machines_is_the_profile(tmp_path: Path) -> None:
    document = json.loads(inside("profiles", "cpu", "--json", cwd=tmp_path).out)
    assert document == load_profile("cpu").model_dump(mode="json")


def test_toggles_by_name(tmp_path: Path) -> None:
    ended = inside("toggles", "NSA_OPT_FUSED", "NSA_DDP_BUCKET_MB", cwd=tmp_path)
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()[1:-1]] == [
        "NSA_OPT_FUSED",
        "NSA_DDP_BUCKET_MB",
    ]


def test_toggles_for_machines(tmp_path: Path) -> None:
    from nsa.toggles import TOGGLES

    ended = inside("toggles", "--json", cwd=tmp_path, NSA_DDP_BUCKET_MB="50")
    document = json.loads(ended.out)
    assert "it goes over the profile and under --set NAME=value" in document["note"]
    rows = {row["name"]: row for row in document["toggles"]}
    assert set(rows) == set(TOGGLES)
    assert rows["NSA_DDP_BUCKET_MB"]["value"] == 50.0
    assert rows["NSA_DDP_BUCKET_MB"]["source"] == "environment"


argcomplete = pytest.importorskip("argcomplete", reason="nsa-runbook[completion] is not installed")

BASH = """\
eval "$SCRIPT"
COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9
_python_argcomplete runbook
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script = f'exec {shlex.quote(sys.executable)} -P -m runbook "$@"'
    program(tmp_path / "tools/runbook", script)
    return tmp_path


def offered(folder: Path, line: str) -> list[str]:
    """The words that bash would offer at the end of `line`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder / 'tools'}:{os.environ['PATH']}", "HOME": str(folder)}
        | {"SCRIPT": argcomplete.shellcode(["runbook"], True, "bash"), "LINE": line},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("runbook wa", ["watch"]),
        ("runbook run --dr", ["--dry-run"]),
    ],
)
def test_what_may_follow(folder: Path, line: str, expected: list[str]) -> None:
    assert sorted(offered(folder, line)) == expected


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "argcomplete.py").write_text("raise ImportError('not here')\n")
    ended = runbook("wa", cwd=tmp_path, PYTHONPATH=str(tmp_path), _ARGCOMPLETE="1")
    assert (ended.code, ended.out) == (2, "")
    assert "pip install 'nsa-runbook[completion]'" in ended.err
