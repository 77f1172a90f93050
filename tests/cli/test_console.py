"""Colour goes to terminals only; text is whole and cannot drive a terminal."""

from __future__ import annotations

import ast
import io
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

import runbook
from runbook.cli.run.observers import LogConsole
from runbook.console import Console, drop, marked, rendered, table_of, whole

LONG = "artifacts/" + "a-very-long-folder-name/" * 20 + "report.md"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


# What decides first stands first: --no-color, NO_COLOR, FORCE_COLOR, the stream itself.
@pytest.mark.parametrize(
    ("flag", "variables", "terminal", "colored"),
    [
        (False, {}, True, False),
        (False, {"FORCE_COLOR": "1"}, True, False),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        (True, {"NO_COLOR": "", "FORCE_COLOR": "1"}, False, True),
        (True, {"FORCE_COLOR": ""}, False, False),
        (True, {"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        (True, {"TERM": "dumb"}, True, False),
        (True, {"CI": "true"}, True, True),
    ],
)
def test_who_decides_about_colour(
    monkeypatch: pytest.MonkeyPatch,
    flag: bool,
    variables: dict[str, str],
    terminal: bool,
    colored: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = Terminal() if terminal else io.StringIO()
    assert Console(stdout=out, stderr=out, color=flag).color_out is colored


def test_quiet_drops_progress_but_neither_results_nor_errors() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(stdout=out, stderr=err, quiet=True)
    console.progress("working")
    console.error("broken")
    console.result("done")
    assert (out.getvalue(), err.getvalue()) == ("done\n", "broken\n")


def test_a_quoted_word_that_the_encoding_lacks_can_be_pasted_all_the_same() -> None:
    word = "/tmp/\u00e4 'b\\"
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    Console(stdout=out, stderr=out).result(f"next  printf %s --out='{word[:6]}x\\y' 'plain' don't")
    line = raw.getvalue().decode("ascii").partition("printf %s ")[2].partition(" don't")[0]
    said = subprocess.run(["bash", "-c", f"printf '%s|' {line}"], capture_output=True, check=True)
    assert said.stdout.decode() == "--out=/tmp/\u00e4x\\y|plain|"
    wide = io.StringIO()
    Console(stdout=wide, stderr=wide).result(f"'{word[:6]}'")
    assert wide.getvalue() == "'/tmp/\u00e4'\n"


def test_a_reader_that_goes_away_ends_what_is_short_and_not_what_goes_on_for_hours() -> None:
    for outlives in (False, True):
        read, write = os.pipe()
        err = io.StringIO()
        with os.fdopen(write, "w") as out:
            console = Console(stdout=out, stderr=err)
            if outlives:
                console.outlive_readers()
            console.result("one")
            os.close(read)
            with nullcontext() if outlives else pytest.raises(BrokenPipeError):
                console.result("two")
            if not outlives:
                drop(out)  # as the program does, which ends then
            console.result("three")
        told = "nobody reads stdout any more: this goes on, and writes its files\n"
        assert err.getvalue() == (told if outlives else "")


def test_both_streams_on_a_full_disk_end_nothing_that_goes_on_for_hours() -> None:
    with Path("/dev/full").open("w") as out, Path("/dev/full").open("w") as err:
        console = Console(stdout=out, stderr=err)
        console.outlive_readers()
        console.result("one", "two")
        assert console.deaf
        drop(err)


# What ends a line, moves the cursor, colors, hides, or turns the reading direction around.
FORGED = [
    "boom\nGO (2 ranks on CPU; forged)",
    "boom\r\nGO (forged)",
    "boom\rGO (forged)",
    "boom\x85GO (forged)\x0bGO\x0cGO\x1cGO",
    "boom\u2028GO (forged)\u2029GO",
    "\x1b[2K\x1b[1GGO (forged)\x1b[32mGO\x1b[0m\x9b2J",
    "\u202e)degrof( OG\u2066x\u200b",
]


@pytest.mark.parametrize("text", FORGED)
@pytest.mark.parametrize("kind", [Console, LogConsole])
def test_no_text_makes_a_line_of_its_own_or_drives_a_terminal(
    kind: type[Console], text: str
) -> None:
    """On a terminal with color; the console's own colors stay."""
    out, err = Terminal(), Terminal()
    console = Console(stdout=out, stderr=err)
    if kind is LogConsole:
        console = LogConsole(console)
    console.result(text, text)
    console.result(marked("", "GO", text, color=console.color_out))
    console.progress(text)
    console.error(text)
    if console.is_live:
        console.draw(text)
        console.draw()
    console.tell({}, [text, table_of(("A", "B"), [("GO", text)], styled=0)])
    shown = out.getvalue() + ("" if kind is LogConsole else err.getvalue())
    own = {"\x1b[32mGO\x1b[0m": 2, "\r\x1b[J": int(console.is_live)}
    for code, count in own.items():
        assert shown.count(code) == count
        shown = shown.replace(code, "")
    assert len(shown.splitlines()) == 8 + console.is_live
    assert all(line.isprintable() for line in shown.splitlines())
    assert not any(line.startswith("GO (") for line in shown.splitlines())


def test_nobody_prints_past_the_console() -> None:
    others = set()
    for path in sorted(Path(runbook.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name == "print" or name.endswith(("stdout.write", "stderr.write")):
                others.add(path.stem)
    # What they write is read by a program, or is the log of a node.
    assert others == {"nvml", "subreaper", "agent", "on_nodes"}


def test_what_is_to_be_copied_is_whole_on_the_narrowest_terminal() -> None:
    command = f"runbook report {LONG}"
    assert rendered(whole(command), table_of((), [("see", LONG)]), width=20).splitlines() == [
        command,
        f"see  {LONG}",
    ]
