"""The structure of report.html: each heading and table row that the record calls for, no other."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from reports.summary import summarize
from reports.view import ReportView, build_view
from runbook.engine.outputs import render
from runbook.records import RunRecord
from runbook.text import short_caveat
from tests.reports.samples import SAMPLES, go

ALONE = {"meta", "br"}
NAMES = {"aria-label", "aria-labelledby"}
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
        self.landmarks: set[str] = set()
        self.unnamed: list[str] = []
        self.pictures = 0
        self.pictures_named = 0
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids |= {named["id"] or ""} if "id" in named else set()
        self.links |= {(named["href"] or "").removeprefix("#")} if "href" in named else set()
        self.landmarks.add(tag)
        self.pictures += tag == "svg"
        parents = self.open[-1:]
        if parents == ["svg"] and tag == "title":
            self.pictures_named += 1
        if tag in ("nav", "section", "figure") and not NAMES & set(named):
            self.unnamed.append(self.get_starttag_text() or tag)
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
    said = record.caveats if record.verdict == "GO" else ()
    words = [record.verdict.value, *([", ".join(map(short_caveat, said))] if said else [])]
    assert page.under("h1") == [" ".join(words)]
    failures = ["What failed and what to do"] if view.causes else []
    decided = ["What decided"] if page.pictures else []
    settings = "Settings to use" if record.verdict == "GO" else "Settings of this run, not approved"
    assert page.under("h2") == [
        *(settings, "Machine and configuration", *failures, *decided),
        *("The numbers", "Phases", "Reference"),
    ]
    causes = [
        f"{one.headline} {one.outcome} {one.code}, "
        f"{'required' if one.lead.required else 'not required'}"
        for one in view.causes
    ]
    shown = [table.title for table in summarize(view).tables]
    phases = [f"{one.index}. {one.record.title}" for one in view.phases]
    reference = ["Required checks", "Environment", "Files"]
    assert page.under("h3") == ["How this run was started", *causes, *shown, *phases, *reference]
    rest = [one for one in view.causes[2:] if one.rerun]  # the first two stand above
    assert page.under("h4").count("To see it again") == len(rest)
    assert page.links <= page.ids
    assert {f"phase-{one.index}" for one in view.phases} <= page.links
    assert_tables(page, view)
    for said in (record.scope, *record.reasons, view.interruption, view.required_counts):
        assert said in page.text
    for name, value in record.exports.items():
        assert f"{'export ' if record.verdict == 'GO' else ''}{name}={value}" in page.text


def assert_tables(page: Outline, view: ReportView) -> None:
    """Every check stands in its phase, and again under the cause that it follows from."""
    rest = list(page.tables)
    for cause in view.causes:
        assert [row[0].split()[0] for row in rest.pop(0)[1:]] == [row.id for row in cause.rows]
    summary = summarize(view)
    numbers = [row[0] for row in rest.pop(0)[1:]]
    assert numbers == [one.label for one in summary.numbers] or numbers == ["-"]
    for small in summary.tables:
        assert tuple(rest.pop(0)[0]) == small.columns
    for one in view.phases:
        passed = [row for row in one.rows if row.outcome in ("PASS", "SKIPPED")]
        others = [row for row in one.rows if row not in passed]
        for rows in filter(None, (others, passed)):
            checks = rest.pop(0)
            assert [row[0].removesuffix(" required") for row in checks[1:]] == [r.id for r in rows]
            assert [row[1] for row in checks[1:]] == [row.outcome for row in rows]
        for table in one.record.tables:
            shown = rest.pop(0)
            assert tuple(shown[0]) == table.columns
            assert len(shown) == 1 + len(table.rows)
        if one.record.unchecked:
            assert len(rest.pop(0)) == 1 + len(one.record.unchecked)
    assert [row[:2] for row in rest.pop(0)[1:]] == [
        [row.id, row.outcome] for row in view.acceptance
    ]
    if view.record.artifacts:
        paths = [row[0] for row in rest.pop(0)[1:]]
        assert paths == [file.path for file in view.record.artifacts]
    assert rest == []


def assert_order(page: Outline) -> None:
    """No level of heading is left out, and there is one of the first."""
    levels = [int(tag[1]) for tag, _ in page.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("make", SAMPLES.values(), ids=list(SAMPLES))
def test_every_heading_and_row_is_there(make: Callable[[], RunRecord]) -> None:
    record = make()
    page = Outline(render(record, "html"))
    assert_structure(page, build_view(record))
    assert_order(page)
    assert {"nav", "main", "header", "footer"} <= page.landmarks
    assert page.unnamed == []
    assert page.pictures == page.pictures_named


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('<h2 id="phases-title">Phases</h2>', ""),
        ("</table>", ""),
        ('<th scope="row"><code>long_run.no_halt</code>', '<th scope="row">'),
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
