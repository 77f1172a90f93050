"""report.html can be read by whoever does not see it: names, landmarks, headings, working links."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from runbook.engine.derive import render
from runbook.records import RunRecord
from tests.reports.samples import SAMPLES, no_go

ALONE = {"meta", "br"}
NAMES = {"aria-label", "aria-labelledby"}


class Outline(HTMLParser):
    """What of a page matters to a screen reader."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.levels: list[int] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.landmarks: set[str] = set()
        self.faults: list[str] = []
        self.pictures = 0
        self.feed(page)
        self.close()
        self.faults += [f"{tag} is left open" for tag in self.open]
        self.faults += [f"#{link} leads nowhere" for link in self.links - self.ids]
        self.faults += ["a picture has no title"] if self.pictures else []
        first, *later = self.levels
        steps = [one for one in pairwise(self.levels) if one[1] > one[0] + 1]
        self.faults += [f"headings {self.levels}"] if first != 1 or 1 in later or steps else []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids |= {named["id"] or ""} if "id" in named else set()
        self.links |= {(named["href"] or "").removeprefix("#")} if "href" in named else set()
        self.landmarks.add(tag)
        self.pictures += (tag == "svg") - (tag == "title" and self.open[-1:] == ["svg"])
        if tag in ("nav", "section", "figure") and not NAMES & set(named):
            self.faults.append(f"{self.get_starttag_text() or tag} has no name")
        if tag in ("h1", "h2", "h3", "h4"):
            self.levels.append(int(tag[1]))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Shapes of the drawings close themselves."""

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open[-1] != tag:
                self.faults.append(f"{self.open.pop()} is left open")
            self.open.pop()


@pytest.mark.parametrize("make", SAMPLES.values(), ids=list(SAMPLES))
def test_a_page_has_names_landmarks_and_headings_in_order(make: Callable[[], RunRecord]) -> None:
    page = Outline(render(make(), "html"))
    assert page.faults == []
    assert {"nav", "main", "header", "footer"} <= page.landmarks


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("</table>", "", "table is left open"),
        ('id="phase-2"', "", "#phase-2 leads nowhere"),
        ("<h3", "<h4", "headings "),
        ("aria-label", "label", " has no name"),
        ("</title><desc>", "</name><desc>", "left open"),
    ],
)
def test_what_is_wrong_with_a_page_is_seen(old: str, new: str, fault: str) -> None:
    page = render(no_go(), "html")
    assert old in page
    assert any(fault in one for one in Outline(page.replace(old, new, 1)).faults)
