"""The structure of report.html: each heading and table row that the record calls for, no other."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from reports.view import ReportView, build_view
from runbook.engine.outputs import render
from runbook.records import RunRecord
from tests.reports.samples import SAMPLES, go

ALONE = {"meta", "br"}
HEADINGS = {"h1", "h2", "h3", "h4"}


class Outline(HTMLParser):
    """Headings, table rows and links of a page; `end` fails if a tag is left open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids |= {named["id"] or ""} if "id" in named else set()
        self.links |= {(named["href"] or "").removeprefix("#")} if "href" in named else set()
        if tag in HEADINGS:
            self.headings.append((tag, ""))
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Shapes of the drawings close themselves."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if heading := next((tag for tag in self.open if tag in HEADINGS), ""):
            self.headings[-1] = (heading, " ".join(f"{self.headings[-1][1]} {data}".split()))
        if {"td", "th"} & set(self.open):
            row = self.tables[-1][-1]
            row[-1] = " ".join(f"{row[-1]} {data}".split())

    def under(self, level: str) -> list[str]:
        return [text for tag, text in self.headings if tag == level]


def assert_structure(page: Outline, view: ReportView) -> None:
    record = view.record
    assert page.under("h1") == [f"Go/No-Go report {record.run_id}"]
    failures = ["Failures and what to do"] if view.problems else []
    assert page.under("h2") == [
        *("Environment", "Acceptance", *failures, "Results", "Recommended exports", "Artifacts")
    ]
    problems = [
        f"{row.id} {row.outcome} {row.code}, {'required' if row.required else 'not required'}"
        for row in view.problems
    ]
    phases = [f"{one.index}. {one.record.title} {one.record.outcome}" for one in view.phases]
    assert page.under("h3") == [*problems, *phases]
    assert page.under("h4") == [table.title for one in view.phases for table in one.record.tables]
    assert page.links == {f"phase-{one.index}" for one in view.phases} <= page.ids

    summary, acceptance, *rest = page.tables
    assert [row[1] for row in summary[1:]] == [one.record.outcome for one in view.phases]
    assert [row[:2] for row in acceptance[1:]] == [[row.id, row.outcome] for row in view.acceptance]
    for one in view.phases:
        checks = rest.pop(0)
        assert [row[0].removesuffix(" required") for row in checks[1:]] == [r.id for r in one.rows]
        assert [row[1] for row in checks[1:]] == [row.outcome for row in one.rows]
        for table in one.record.tables:
            shown = rest.pop(0)
            assert tuple(shown[0]) == table.columns
            assert len(shown) == 1 + len(table.rows)
        if one.measured:
            assert len(rest.pop(0)) == 1 + len(one.measured)
    if record.artifacts:
        assert [row[0] for row in rest.pop(0)[1:]] == [file.path for file in record.artifacts]
    assert rest == []
    for said in (record.scope, *record.reasons, view.interruption, view.required_counts):
        assert said in page.text
    for name, value in record.exports.items():
        assert f"export {name}={value}" in page.text


@pytest.mark.parametrize("make", SAMPLES.values(), ids=list(SAMPLES))
def test_every_heading_and_row_is_there(make: Callable[[], RunRecord]) -> None:
    record = make()
    assert_structure(Outline(render(record, "html")), build_view(record))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<h2>Artifacts</h2>", ""),
        ("</table>", ""),
        ('<td class="key"><code>long_run.no_halt</code></td>', ""),
        ("#phase-2", "#phase-9"),
        ("all 4 required checks passed", ""),
        ("export NSA_DDP_BUCKET_MB=50", ""),
    ],
)
def test_the_check_of_structure_can_fail(old: str, new: str) -> None:
    page = render(go(), "html")
    assert old in page
    with pytest.raises((AssertionError, IndexError)):
        assert_structure(Outline(page.replace(old, new, 1)), build_view(go()))
