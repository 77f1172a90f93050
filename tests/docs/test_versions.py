"""The page of versions, pyproject.toml, the tools and the workflow claim the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = TOML["project"]
NIGHTLY = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly-tests.yml").read_text("utf-8"))


def section(title: str) -> str:
    """What stands under a heading of the page."""
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Cells of the rows of the section's table, without its two head lines."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def pythons() -> list[str]:
    """Those of requires-python, which has the form >=3.A,<3.B."""
    found = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"])
    assert found is not None
    return [f"3.{number}" for number in range(int(found[1]), int(found[2]))]


def good() -> list[list[str]]:
    return [row for row in rows("What was run") if not row[4].startswith("NO-GO")]


def test_every_python_that_is_claimed_was_run_and_no_other() -> None:
    assert {minor(row[0]) for row in good()} == set(pythons())
    assert all(f"{number}" in section("The ranges").splitlines()[1] for number in pythons())
    prefix = "Programming Language :: Python :: "
    assert [text.removeprefix(prefix) for text in PROJECT["classifiers"]] == pythons()


def test_the_lower_bounds_are_those_of_the_page() -> None:
    claimed = [[name, version] for name, version in rows("The ranges")]
    assert claimed == [text.split(",")[0].split(">=") for text in PROJECT["dependencies"]]


def test_what_continuous_integration_runs_is_on_the_page() -> None:
    pairs = {
        (entry["python"], entry["torch"])
        for entry in NIGHTLY["jobs"]["cpu"]["strategy"]["matrix"]["pair"]
    }
    assert pairs <= {(minor(row[0]), row[1]) for row in good()}
    assert {python for python, _ in pairs} >= {pythons()[0], pythons()[-1]}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()[0]
    assert pinned.removeprefix("torch==") in {torch for _, torch in pairs}
