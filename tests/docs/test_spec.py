"""The specification holds: its numbers are unique, and every name on it and of it exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from nsa.toggles import TOGGLES
from runbook.config.load import load_profile
from runbook.config.plan import load_plan, with_plan
from runbook.config.registry import known_checks

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "docs" / "spec.md"
TEXT = SPEC.read_text(encoding="utf-8")
STATUSES = ("met", "partly", "not met", "contradicted")
NUMBER = r"[A-Z]{1,2}\d{1,2}"


def table_rows(text: str) -> list[list[str]]:
    """Cells of every row whose first cell is a requirement's number."""
    rows = [line for line in text.splitlines() if re.match(rf"\| {NUMBER} \|", line)]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


REQUIREMENTS = {row[0]: row for row in table_rows(TEXT)}


def code(text: str) -> list[str]:
    """What stands between backquotes."""
    return re.findall(r"`([^`\n]+)`", text)


@cache
def functions_of(file: Path) -> frozenset[str]:
    """Names of the test functions of a file; empty if it is not there."""
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def missing_tests(cited: Iterable[str]) -> list[str]:
    """Tests that are not where they are said to be."""
    places = ((one, *one.split("::")) for one in cited)
    return [one for one, file, name in places if name not in functions_of(ROOT / file)]


@pytest.mark.parametrize("number", REQUIREMENTS)
def test_a_row_says_who_demands_it_and_what_became_of_it(number: str) -> None:
    row = REQUIREMENTS[number]
    assert len(row) == 6, row
    documents = {"validation", "report v4", "production", "first report", "cheatsheet"}
    assert set(row[2].split(", ")) <= documents
    status = next(word for word in STATUSES if row[5].startswith(word))
    if status == "met":
        assert "::" in row[4], "a requirement that is met names the test that shows it"
    if status in ("partly", "not met", "contradicted"):
        assert row[5].startswith(f"{status}: "), "it says what is missing, or why"


def test_every_check_exists() -> None:
    known = {
        check
        for name in ("a100x2_pcie4", "cpu")
        for check in known_checks(
            with_plan(load_profile(name), load_plan("production"), shipped=True)
        )
    }
    phases = {check.split(".")[0] for check in known}
    cited = {word for word in code(TEXT) if re.fullmatch(r"[a-z0-9_]+\.[a-z0-9_]+", word)}
    named = {word for word in cited if word.split(".")[0] in phases}
    assert named <= known, sorted(named - known)
    assert len(named) > 50


def test_every_test_exists() -> None:
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for text, least in ((TEXT, 100), (security, 10)):
        cited = [word for word in code(text) if "::" in word]
        assert missing_tests(cited) == []
        assert len(cited) >= least


def test_every_toggle_and_config_exists() -> None:
    named = set(re.findall(r"\bNSA_[A-Z0-9_]+\b", TEXT))
    assert named <= set(TOGGLES), sorted(named - set(TOGGLES))
    configs = set(re.findall(r"configs/[\w./]+\.yaml", TEXT))
    assert all((ROOT / path).is_file() for path in configs)


def test_the_documented_defaults_are_the_toggles() -> None:
    """Requirements V5, E8, E10, E15 and C8."""
    defaults = {name.removeprefix("NSA_"): toggle.default for name, toggle in TOGGLES.items()}
    documented = {
        "SEL_RANGES_V2": True,
        "DDP_DISABLE_GC": True,
        "TB_DISABLE": True,
        "PG_TIMEOUT_MIN": 15,
        "SCALER_INIT_SCALE": 65536,
        "SCALER_GROWTH_INTERVAL": 2000,
        "SCALER_GROWTH_FACTOR": 2.0,
        "SCALER_BACKOFF_FACTOR": 0.5,
    }
    assert documented.items() <= defaults.items()


PAGES = [
    *(f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *(str(path.relative_to(ROOT)) for path in sorted(SPEC.parent.glob("*.md"))),
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("benchmarks/results/*.md"))),
]


def anchors(page: Path) -> set[str]:
    """What a link may name behind its #: the headings of a page, as GitHub spells them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page that lead to no file, or to no heading of it."""
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        known = anchors(target) if anchor and target.suffix == ".md" and target.exists() else None
        if not target.exists() or (known is not None and anchor not in known):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_heading_of_a_file(page: str) -> None:
    assert broken_links(ROOT / page, (ROOT / page).read_text(encoding="utf-8")) == []
