"""The commands that the program prints, found as a reader finds them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from phases.kit.playbook import fitting, playbook, told
from runbook.engine.derive import render
from runbook.records import RunRecord
from runbook.records.invocation import Invocation
from tests.phases.answers import ON_A_CPU, ON_TWO_A100

ROOT = Path(__file__).parents[2]
PROGRAMS = ("runbook", "python", "python3", "pytest", "torchrun", "export", "sudo", "git")
# What tells of the past is left out, and with it the commands that were removed.
PAGES = (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
         *sorted((ROOT / "docs").glob("*.md")))  # fmt: skip
_TOLD = re.compile(r"^ *(?:next|then|rerun|resume)(?:: | +)(\S.*?)(?:  .*)?$", re.MULTILINE)


def commands_of(record: RunRecord) -> dict[str, None]:
    """Every line of a shell block, and every code span that begins with a program."""
    found: dict[str, None] = {}
    for fmt in ("md", "details"):
        found |= commands_in_markdown(render(record, fmt))
    return found | commands_in_html(render(record, "html"))


def commands_in_markdown(text: str) -> dict[str, None]:
    found: dict[str, None] = {}
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "fence":
            found |= dict.fromkeys(token.content.splitlines())
        spans = (inner for inner in token.children or [] if inner.type == "code_inline")
        found |= dict.fromkeys(span.content for span in spans if is_command(span.content))
    return found


def commands_in_html(page: str) -> dict[str, None]:
    found: dict[str, None] = {}
    for block in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL):
        found |= dict.fromkeys(html.unescape(block).splitlines())
    spans = map(html.unescape, re.findall(r"<code[^>]*>(.*?)</code>", page))
    return found | dict.fromkeys(filter(is_command, spans))


def commands_in_pages() -> Iterator[tuple[str, str]]:
    """Each page of the docs with every command of this program on it, one at a time."""
    for page in PAGES:
        for text in commands_in_markdown(page.read_text("utf-8")):
            lines = re.split(r"; | \| | {2,}#", text)
            yield from ((page.name, line) for line in lines if line.startswith("runbook "))


def commands_in_output(text: str) -> dict[str, None]:
    """What a terminal, or an annotation of GitHub, says to type, without what it is for."""
    return dict.fromkeys(_TOLD.findall(text.replace("%0A", "\n")))


def is_command(text: str) -> bool:
    return text.partition(" ")[0] in PROGRAMS and " " in text


def told_by_remedies() -> Iterator[str]:
    """The commands that remedies name between backticks."""
    for remedy in (*playbook().by_topic.values(), *playbook().by_reason.values()):
        for now in (ON_TWO_A100, ON_A_CPU):
            yield from filter(is_command, re.findall(r"`([^`]+)`", told(remedy, now)))
            yield from (one.command for one in fitting(remedy, now) if one.command)


def told_by_invocations() -> Iterator[str]:
    """Every form of a line that an invocation makes: a run's and a plan's, begun and continued."""
    for one in (Invocation(profile="cpu"), Invocation(profile="cpu", plan="production")):
        yield one.line(["preflight", "baseline"])
        yield one.resume_line("20260101T000000Z-abc1234")
        yield one.resume_line("20260101T000000Z-abc1234", ["nvtx"])
