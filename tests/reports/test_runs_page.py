"""The page about all runs: whole, offline, escaped, and honest about what is near a limit."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from reports.runs_pages import render_runs, spark
from runbook.cli import main
from runbook.tools.export import MetricRow
from runbook.tools.history import RunRow, RunsPage, Trend
from tests.engine.test_history import at, store
from tests.reports.samples import no_go

EVIL = "<script>alert(1)</script>\"'\n`"
RUN = RunRow(folder="r1", run_id="r1", profile="cpu", verdict="GO", said="GO", scope="2 ranks")


def trend(*values: float, name: str = "baseline.throughput") -> Trend:
    row = MetricRow(
        name=name, phase="baseline", run_id="r", started_at="", profile="cpu", verdict="GO",
        line="l", on_what="cpu", text="",
    )  # fmt: skip
    rows = tuple(replace(row, value=value) for value in values)
    return Trend(name=name, unit="tok/s", on_what="cpu", line="l", rows=rows)


class Balance(HTMLParser):
    """Collects links, and fails on a tag that is closed twice or never."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "br", "input", "line", "polyline", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline", "circle"):
            assert self.open.pop() == tag


def parsed(text: str) -> Balance:
    found = Balance()
    found.feed(text)
    assert not found.open
    return found


def test_the_newest_run_is_first_and_links_to_its_report(tmp_path: Path) -> None:
    for day, rate in enumerate((40.0, 44.0), start=1):
        folder = store(tmp_path, f"r{day}", at(rate), started_at=f"2026-11-0{day}T00:00:00Z")
        (folder / "report.html").write_text("x")
    store(tmp_path, "r3", no_go(), started_at="2026-11-03T00:00:00Z", profile="other")
    assert main(["history", "--html", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text()
    assert parsed(page).links == ["r2/report.html", "r1/report.html"]
    assert page.index(">r3<") < page.index(">r2<") < page.index(">r1<")
    assert "+10.0% against the median of 1" in page
    elsewhere = tmp_path / "pages"
    elsewhere.mkdir()
    assert main(["history", "--html", str(elsewhere / "a.html"), "--out", str(tmp_path)]) == 0
    assert "../r2/report.html" in (elsewhere / "a.html").read_text()


def test_no_script_and_no_network_and_a_filter_by_profile() -> None:
    page = render_runs(
        RunsPage(runs=(RUN, replace(RUN, folder="r2", run_id="r2", profile="a100x2")),
                 trends=(trend(1.0, 2.0),), links={})
    )  # fmt: skip
    assert "script" not in parsed(page).tags
    assert "default-src 'none'" in page
    assert not re.search(r"https?://", page)
    assert page.count('<input type="radio"') == 3
    assert 'data-profile="2"' in page and "#p2:checked" in page


def test_nothing_from_a_record_is_markup() -> None:
    evil = replace(RUN, folder=EVIL, run_id=EVIL, profile=EVIL, said=EVIL, scope=EVIL, verdict=EVIL)
    page = render_runs(
        RunsPage(runs=(evil,), trends=(trend(1.0, 2.0, name=EVIL),), links={EVIL: EVIL})
    )
    found = parsed(page)
    assert "script" not in found.tags
    assert all("<" not in link and '"' not in link for link in found.links)


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    assert spark(trend(1.0)) == ""
    assert "polyline" in spark(trend(5.0, 5.0))
    assert spark(trend(1e300, 2.0)) == ""
