"""Commands and examples of all pages hold; the page of versions says what all others do."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from benchmarks.examples.__main__ import (
    BEGIN,
    END,
    EXAMPLES,
    REPORTS,
    Example,
    command,
    table,
    verdict_line,
)
from runbook import EXTRAS, absent
from runbook.cli import COMMANDS, in_full, main
from runbook.cli._parser import parse_all
from runbook.tools.export import prometheus_text
from tests.docs.test_spec import ROOT
from tests.reports import samples
from tests.reports.printed import commands_in_pages


def not_taken(line: str) -> list[str]:
    """What the program says of the words of a command; an option may be named without its value."""
    name, *words = in_full(shlex.split(line)[1:])
    if not words:
        return [] if name in {*COMMANDS, "--help"} else [f"no command {name}"]
    found = map(str, parse_all(COMMANDS[name].parser(), words)[1])
    return [text for text in found if not text.startswith(f"{words[-1]}: expected one argument")]


def test_every_command_of_every_page_is_taken_by_the_program() -> None:
    found = [(page, line, not_taken(line)) for page, line in commands_in_pages()]
    assert len(found) > 80 and len({page for page, *_ in found}) > 12
    assert [one for one in found if one[2]] == []


def test_every_metric_on_the_page_is_written_and_the_other_way_round() -> None:
    written = set(re.findall(r"^# TYPE (\w+)", prometheus_text(samples.go()), re.MULTILINE))
    page = (ROOT / "docs" / "exporting.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\brunbook_\w+", page)) == written


def test_the_page_of_launches_has_the_extra_of_every_package_that_may_be_missed() -> None:
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    told = {module: absent(module).partition("; ")[2] for module in EXTRAS}
    assert {module: line for module, line in told.items() if f"`{line}`" not in page} == {}


DOCS = ROOT / "docs" / "examples"
ENDS = {0: ("GO",), 1: ("NO-GO",), 3: ("INCOMPLETE",), 4: ("PARTIAL PASS",)}


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    found: Example = request.param
    return found


def test_it_is_there_and_ended_as_it_had_to(example: Example) -> None:
    folder = DOCS / example.name
    assert all((folder / name).stat().st_size for name in REPORTS)
    assert verdict_line(folder / "report.md").startswith(ENDS[example.exit_code])


def test_it_can_be_planned(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(example, tmp_path)
    assert main([*words[words.index("run") :], "--dry-run"]) == 0, capsys.readouterr().err


def test_the_index_is_the_one_that_the_command_writes() -> None:
    assert f"{BEGIN}\n{table(DOCS)}\n{END}" in (DOCS / "README.md").read_text(encoding="utf-8")


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


def test_the_first_page_can_be_read_in_one_go() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    assert len(re.findall(r"\]\(", readme)) <= 25
    assert len(re.findall(r"^\| `runbook", readme, re.MULTILINE)) == 8
