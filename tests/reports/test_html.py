"""report.html can be read by whoever does not see it: names, landmarks, headings, working links."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from reports.formats.terminal import render_github
from runbook.engine.derive import render
from runbook.records import Check, Outcome, RunRecord
from runbook.records.run import Screen
from tests.factory.records import check
from tests.reports import samples
from tests.reports.samples import SAMPLES

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


# Annotations that GitHub's runner reads as they were meant, and nothing else as a command.

_COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\r\n]*)::([^\r\n]*)")


def told_in(record: RunRecord) -> list[tuple[str, str, str]]:
    """Level, title and message of each command, unescaped as a runner does it."""
    found = []
    for line in render_github(record, Screen()).splitlines():
        match = _COMMAND.fullmatch(line)
        assert match, line
        level, title, message = match.groups()
        title = title.replace("%3A", ":").replace("%2C", ",")
        found.append((level, *(_plain(text) for text in (title, message))))
    return found


def _plain(text: str) -> str:
    return text.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def with_checks(*checks: Check) -> RunRecord:
    record = samples.no_go()
    phase = record.phases[1].model_copy(update={"checks": checks})
    return record.model_copy(update={"phases": (record.phases[0], phase, *record.phases[2:])})


def failed(number: int, reason: str) -> Check:
    return check(
        f"baseline.row{number}",
        Outcome.FAIL,
        reason=reason,
        remedy=f"do {number}",
        evidence=(f"baseline/{number}.csv",),
        rerun="runbook run --phase baseline --profile cpu",
        required=True,
    )


def test_a_run_that_failed_has_an_error_with_what_to_do() -> None:
    level, title, message = told_in(samples.no_go())[0]
    assert level == "error" and title.startswith("FAIL ")
    assert "23 tok/s is below 39" in message
    assert "\nsee: baseline/launch_0/training.csv" in message
    assert "\ntry: " in message
    assert "\nnext: runbook run --phase baseline --profile a100x2_pcie4" in message


def test_github_is_never_given_more_than_it_shows() -> None:
    checks = [failed(number, f"fault {chr(97 + number)}") for number in range(20)]
    shown = told_in(with_checks(*checks))
    errors = [title for level, title, _ in shown if level == "error"]
    assert len(errors) <= 10
    if len(errors) == 10:
        assert errors[-1].endswith("more errors")
