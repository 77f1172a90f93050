"""Strings out of logs and configs must never act as markup, as escapes or as new lines."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from reports.text import html_told, markdown_told
from runbook.config import registry
from runbook.engine import derive
from runbook.records import RunRecord
from tests.reports.samples import no_go
from tests.tiers import examples

NASTY = [
    "a|b||c \\| d",
    "`x` ``y`` ```\n# heading\n```",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "line one\n\n# line two\n| a | b |\n|---|---|",
    "\x1b[2J\x1b[31mred\x07\x00\x9b1m",
    "a\u202eb\u200bc\ufeff\u2028d",
    "[click](javascript:alert(1)) ![x](http://x) *b* __c__ ~~d~~ &lt; &#60;",
    "{{ 7 * 7 }} {% include 'x' %} ]]> --> \"' onload=\"x",
    "\\",
    "ends with backtick `",
]
OWN_PAGES = {"report.md", "details.md", "report.html"}
# Words that the record's own rules or the reports' structure depend on.
FIXED = {"id", "phase", "outcome", "code", "verdict", "comparator", "kind", "status", "sha256"}
FIXED |= {"profile_sha256", "required", "name", "schema_version", "run_dir"}
# The steps of the playbook, with code between backticks.
FIXED |= {"remedy", "remedies"}


def spoil(node: Any, text: str, key: str = "") -> Any:
    """The same document with every free string replaced."""
    if isinstance(node, dict):
        return {name: spoil(value, text, name) for name, value in node.items()}
    if isinstance(node, list):
        return [spoil(value, text, key) for value in node]
    if isinstance(node, str) and key not in FIXED and node:
        return text
    return node


def spoiled(text: str) -> RunRecord:
    return RunRecord.model_validate(spoil(no_go().model_dump(mode="json"), text))


def markdown_shape(text: str) -> list[tuple[str, str]]:
    """Block structure as an independent Markdown parser sees it; tables count their cells."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        for inner in token.children or []:
            assert inner.type in {
                *("text", "code_inline", "strong_open", "strong_close", "text_special"),
                *("softbreak", "link_close"),
            } or (inner.type == "link_open" and inner.attrGet("href") in OWN_PAGES), inner
    return [(token.type, token.tag) for token in tokens if not _is_inline(token)]


def _is_inline(token: Token) -> bool:
    return token.type == "inline"


class TagCounter(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(name for name, _ in attrs)))


def html_shape(text: str) -> list[tuple[str, tuple[str, ...]]]:
    counter = TagCounter()
    counter.feed(text)
    return counter.seen


BENIGN = spoiled("word")
SHAPES = {
    "md": markdown_shape(derive.render(BENIGN, "md")),
    "details": markdown_shape(derive.render(BENIGN, "details")),
    "html": html_shape(derive.render(BENIGN, "html")),
    "lines": len(derive.render(BENIGN, "terminal").splitlines()),
    "junit": [node.tag for node in ET.fromstring(derive.render(BENIGN, "junit")).iter()],
}


def assert_neutral(record: RunRecord) -> None:
    texts = {fmt: derive.render(record, fmt) for fmt in registry.names(registry.REPORT_GROUP)}
    for fmt, text in texts.items():
        bad = [c for c in text if (c < " " and c not in "\n\t") or c in "\x7f\x9b\u202e\u200b"]
        assert not bad, (fmt, bad)
    for name in ("md", "details"):
        assert markdown_shape(texts[name]) == SHAPES[name]
    assert html_shape(texts["html"]) == SHAPES["html"]
    assert len(texts["terminal"].splitlines()) == SHAPES["lines"]
    commands = texts["github"].splitlines()
    assert commands and all(line.startswith("::") for line in commands), "no line of its own"
    assert [node.tag for node in ET.fromstring(texts["junit"]).iter()] == SHAPES["junit"]


@pytest.mark.parametrize("text", NASTY)
def test_hostile_text_changes_no_structure(text: str) -> None:
    assert_neutral(spoiled(text))


@examples(60)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.strip))
def test_any_text_changes_no_structure(text: str) -> None:
    assert_neutral(spoiled(text))


@pytest.mark.parametrize("text", [*NASTY, "# a", "a `b", "`a` b `c"])
def test_a_step_is_one_paragraph_whatever_stands_between_its_backticks(text: str) -> None:
    for step in (text, f"read `{text}` first", f"`{text}`{text}"):
        shape = markdown_shape(f"1. {markdown_told(step)}\n")
        assert [tag for _, tag in shape].count("p") == 2 and len(shape) == 6
        assert {tag for tag, _ in html_shape(html_told(step))} <= {"code"}


def test_the_checker_sees_an_unescaped_pipe_and_tag() -> None:
    """The shape test itself must be able to fail."""
    text = derive.render(BENIGN, "details")
    assert markdown_shape(text.replace("| word |", "| wo|rd |\n\n# x\n", 1)) != SHAPES["details"]
    page = derive.render(BENIGN, "html")
    assert html_shape(page.replace("word", "<b>word</b>", 1)) != SHAPES["html"]
