"""What benchmarks share: tables and the pages that hold them, options, lines that survive a cut."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runbook.files import write_atomic
from runbook.folder.launch import heartbeats_in

# What a program exits with when its time is over and it can go on: EX_TEMPFAIL of sysexits.
TO_BE_CONTINUED = 75


class Program:
    """The options of a benchmark that can be cut off and goes on, and the time that it has."""

    def __init__(self, description: str | None) -> None:
        self.began = time.monotonic()
        self.parser = argparse.ArgumentParser(
            description=(description or "").partition("\n")[0], allow_abbrev=False
        )
        self.parser.add_argument("--out", type=Path, required=True, metavar="DIR")
        self.parser.add_argument("--left-s", type=float, default=480.0, metavar="S")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Read the command line; the folder exists afterwards, `rows` are what it holds."""
        self.args = self.parser.parse_args(argv)
        self.args.out.mkdir(parents=True, exist_ok=True)
        self._lines: Path = self.args.out / "rows.jsonl"
        self.rows: list[dict[str, Any]] = read_lines(self._lines)
        return self.args

    def keep(self, row: dict[str, Any]) -> None:
        """One row more, which the next call with the same folder has from the beginning."""
        append_line(self._lines, row)
        self.rows.append(row)

    @property
    def left_s(self) -> float:
        """Seconds until the program should have ended."""
        return float(self.args.left_s) - (time.monotonic() - self.began)

    def write(self, summary: str, table: str, document: Mapping[str, object]) -> None:
        """What there is so far, for whoever is cut off after this; the table is Markdown."""
        out: Path = self.args.out
        write_atomic(
            out / "result.json", json.dumps({"summary": summary, **document}, indent=2) + "\n"
        )
        write_atomic(out / "table.md", table.rstrip("\n") + "\n")
        print(summary, flush=True)


def names(text: str) -> list[str]:
    """Those of a comma-separated list."""
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    """Those of a comma-separated list."""
    return [int(part) for part in names(text)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def put_between(page: Path, begin: str, end: str, inside: str) -> None:
    """Put a table between two marks of a page. Raises ValueError where it lacks one."""
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page}: needs the lines {begin!r} and {end!r} once each")
    head, tail = text.partition(begin)[0], text.partition(end)[2]
    page.write_text(f"{head}{begin}\n{inside}\n{end}{tail}", encoding="utf-8")


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """One JSON line more, written at once."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole JSON lines of a file; a torn last one, which a cut leaves, is left out."""
    return [dict(row) for row in heartbeats_in(path)] if path.is_file() else []
