"""The composite action and the container recipe do what they say, with the versions of the rest."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from runbook.cli import COMMANDS
from runbook.cli._parser import parse_all
from runbook.files import data_path
from tests.factory.programs import program

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
RECIPE = (ROOT / "Containerfile").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TOOL = PYPROJECT["project"], PYPROJECT["tool"]


def step(name: str) -> dict[str, Any]:
    (found,) = [step for step in ACTION["runs"]["steps"] if step.get("name") == name]
    return found


def test_inputs_are_described_and_used() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    for name, entry in ACTION["inputs"].items():
        assert entry["description"] and isinstance(entry["default"], str)
        assert re.search(rf"inputs\.{name}\b", text), name
    for name in set(re.findall(r"inputs\.([\w-]+)", text)):
        assert name in ACTION["inputs"]


@pytest.mark.parametrize("code", [0, 1])
def test_inputs_reach_the_program_as_they_are_and_its_exit_code_the_job(
    tmp_path: Path, code: int
) -> None:
    """The step's own script, with a program in the place of runbook that says what it got."""
    told = tmp_path / "told"
    program(tmp_path / "nsa-runbook/bin/runbook", f"printf '%s\\n' \"$@\" > '{told}'; exit {code}")
    env = {name: ACTION["inputs"][re.findall(r"inputs\.([\w-]+)", text)[0]]["default"]
           for name, text in step("Run")["env"].items()}  # fmt: skip
    env |= {"PHASES": "preflight; touch evil", "RUNNER_TEMP": str(tmp_path)}
    env |= {"GITHUB_OUTPUT": str(tmp_path / "output"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step("Run")["run"]],
        env=env, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert (tmp_path / "output").read_text() == f"exit-code={code}\n"
    words = told.read_text().splitlines()
    assert words == [
        "run", "--phase", "preflight; touch evil", "--profile", "auto",
        "--partial-exit", "4", "--out", "artifacts", "--output-format", "github",
    ]  # fmt: skip
    assert parse_all(COMMANDS[words[0]].parser(), words[1:])[1] == []


def test_every_page_that_the_program_names_is_in_the_wheel() -> None:
    """Comments are for a checkout: of a module the words that it prints, of the playbook all."""
    page_of = re.compile(r"docs/([\w.-]+\.(?:md|json))")
    named = set(page_of.findall((ROOT / "phases/kit/playbook.yaml").read_text()))
    for path in (
        one for name in ("runbook", "phases", "reports") for one in ROOT.glob(f"{name}/**/*.py")
    ):
        tree = ast.parse(path.read_text("utf-8"))
        modules = {ast.get_docstring(tree, clean=False)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value not in modules
            ):
                named |= set(page_of.findall(node.value))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "page":
                named.add(f"{ast.literal_eval(node.args[0])}.md")
    wheel = TOOL["hatch"]["build"]["targets"]["wheel"]["force-include"]
    pages = {Path(path).name: place for path, place in wheel.items() if path.startswith("docs/")}
    assert pages.keys() == named
    assert set(pages.values()) == {f"runbook/_data/docs/{name}" for name in named}
    assert all((data_path("docs") / name).samefile(ROOT / "docs" / name) for name in named)


def test_the_containers_python_is_one_that_is_claimed_and_torch_that_of_the_constraints() -> None:
    (python,) = re.findall(r"^ARG BASE=\S*python:(\d\.\d+)-slim", RECIPE, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    assert "grep '^torch==' constraints.txt" in RECIPE
    assert not re.search(r"torch==\d|torch>=", RECIPE), "the version is that of constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==[\d.]+$", pinned, re.MULTILINE)


def test_no_image_carries_what_git_does_not() -> None:
    kept_out = (ROOT / ".containerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv", "artifacts"} <= set(kept_out)
    assert re.search(r"^USER \d+$", RECIPE, re.MULTILINE), "not as root"
