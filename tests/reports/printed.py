"""The commands that pages print, found as a reader finds them."""

from __future__ import annotations

import html
import re
import shlex

from markdown_it import MarkdownIt

from runbook.engine.outputs import render
from runbook.records import RunRecord

PROGRAMS = ("runbook", "python", "python3", "pytest", "torchrun", "export", "sudo")


def commands_of(record: RunRecord) -> dict[str, None]:
    """Every line of a shell block, and every code span that begins with a program."""
    found: dict[str, None] = {}
    for fmt in ("md", "details"):
        for token in MarkdownIt("commonmark").enable("table").parse(render(record, fmt)):
            if token.type == "fence":
                found |= dict.fromkeys(token.content.splitlines())
            spans = (inner for inner in token.children or [] if inner.type == "code_inline")
            found |= dict.fromkeys(span.content for span in spans if is_command(span.content))
    page = render(record, "html")
    for block in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL):
        found |= dict.fromkeys(html.unescape(block).splitlines())
    spans = map(html.unescape, re.findall(r"<code>(.*?)</code>", page))
    return found | dict.fromkeys(filter(is_command, spans))


def is_command(text: str) -> bool:
    return text.partition(" ")[0] in PROGRAMS and " " in text


def kind_of(line: str) -> tuple[str, ...]:
    """Program, sub-command or module, and flags: commands that differ only in values are one."""
    words = shlex.split(line)
    while "=" in words[0]:
        words.pop(0)
    program, *rest = words
    what = rest[rest.index("-m") + 1] if "-m" in rest else rest[0]
    flags = {word.partition("=")[0] for word in rest if word.startswith("-")}
    return (program, "" if program == "export" else what, *sorted(flags))
