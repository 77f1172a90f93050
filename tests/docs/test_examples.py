"""The examples in the documents: each is there, ended as it had to, and is as short as promised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.examples.__main__ import REPORTS, command, page, profile_document, verdict_line
from benchmarks.examples.catalog import EXAMPLES, Example
from benchmarks.examples.pictures import SCREENS, WHOLE, picture_name, whole_name
from runbook.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "examples"
IMAGES = ROOT / "docs" / "images"
ENDS = {0: ("GO",), 1: ("NO-GO",), 3: ("INCOMPLETE",)}
LONGEST = {0: 80, 1: 120, 3: 120}
LARGEST_BYTES = 600 << 10


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    found: Example = request.param
    return found


def test_it_is_there_and_ended_as_it_had_to(example: Example) -> None:
    folder = DOCS / example.name
    assert all((folder / name).stat().st_size for name in REPORTS)
    assert verdict_line(folder / "report.md").startswith(ENDS[example.exit_code])


def test_its_first_page_is_short_and_its_html_small(example: Example) -> None:
    folder = DOCS / example.name
    lines = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST[example.exit_code]
    assert (folder / "report.html").stat().st_size <= LARGEST_BYTES


def test_a_changed_checkout_is_not_one_more_thing_that_is_wrong(example: Example) -> None:
    report = (DOCS / example.name / "report.md").read_text(encoding="utf-8")
    commit = re.search(r"^- Commit: .*$", report, re.MULTILINE)
    assert commit and commit[0].endswith(", clean")


def test_it_was_made_beside_no_other_run(example: Example) -> None:
    """The page of one would show the commands and folders of another."""
    pages = [(DOCS / example.name / name).read_text(encoding="utf-8") for name in REPORTS]
    assert not any("of a live run" in text for text in pages)


def test_its_pictures_are_there(example: Example) -> None:
    for width, _ in SCREENS:
        for dark in (False, True):
            assert (IMAGES / picture_name(example.name, width, dark=dark)).is_file()
    assert (IMAGES / whole_name(WHOLE)).is_file()


def test_it_can_be_planned(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(example, tmp_path)
    assert main([*words[words.index("run") :], "--dry-run"]) == 0, capsys.readouterr().err


def test_gates_come_on_top_of_what_is_required() -> None:
    gated = [example for example in EXAMPLES if example.gates]
    assert gated
    for example in gated:
        required = profile_document(example)["required"]
        assert isinstance(required, list) and set(example.gates) < set(required)


def test_the_index_is_the_one_that_the_command_writes() -> None:
    assert (DOCS / "README.md").read_text(encoding="utf-8") == page(DOCS)


def test_every_link_of_the_index_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", page(DOCS))
    assert len(links) >= len(EXAMPLES)
    assert all((DOCS / link.partition("#")[0]).is_file() for link in links)


def test_a_report_without_a_verdict_is_noticed(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text("# Go/No-Go report\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no verdict"):
        verdict_line(report)
