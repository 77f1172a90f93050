"""Colour goes to terminals only; text is whole and cannot drive a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.console import Console, printable
from tests.cli.shell import ESCAPE

LONG = "artifacts/" + "a-very-long-folder-name/" * 20 + "report.md"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_pipe_gets_no_escapes() -> None:
    out = io.StringIO()
    console = Console(stdout=out, stderr=io.StringIO())
    console.result(console.paint("GO", "good"))
    assert out.getvalue() == "GO\n"
    assert not console.is_live


def test_a_terminal_gets_colour() -> None:
    out = Terminal()
    console = Console(stdout=out, stderr=Terminal())
    console.result(console.paint("GO", "good"))
    assert out.getvalue() == "\x1b[32mGO\x1b[0m\n"
    assert console.is_live


@pytest.mark.parametrize(
    ("variable", "value", "colored"),
    [("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False)],
)
def test_variables_that_forbid_colour(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, colored: bool
) -> None:
    monkeypatch.setenv(variable, value)
    console = Console(stdout=Terminal(), stderr=Terminal())
    assert console.color_out is colored
    assert console.is_live is colored


def test_the_flag_forbids_colour() -> None:
    console = Console(stdout=Terminal(), stderr=Terminal(), color=False)
    assert console.paint("GO", "good") == "GO"
    assert not console.is_live


def test_quiet_drops_progress_but_neither_results_nor_errors() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(stdout=out, stderr=err, quiet=True)
    console.progress("working")
    console.error("broken")
    console.result("done")
    assert (out.getvalue(), err.getvalue()) == ("done\n", "broken\n")


def test_paths_are_never_cut() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(stdout=out, stderr=err)
    console.result(LONG)
    console.progress(LONG)
    assert out.getvalue() == err.getvalue() == LONG + "\n"


def test_one_json_document_is_one_line() -> None:
    out = io.StringIO()
    Console(stdout=out, stderr=io.StringIO()).json_line({"text": "two\nlines", "n": 1.5})
    assert out.getvalue().count("\n") == 1
    assert json.loads(out.getvalue()) == {"text": "two\nlines", "n": 1.5}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ± text, é", "plain ± text, é"),
        ("two\nlines\tand tab", "two\nlines\tand tab"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("over\rwritten", "over\\rwritten"),
        ("left\u202eright", "left\\u202eright"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def in_terminal(action: Callable[[], None]) -> str:
    """What `action` writes when stdout and stderr are a real terminal of 80 columns."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"] = "80"
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        action()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.waitpid(pid, 0)
    return b"".join(chunks).decode()


def draw_with_a_long_line() -> None:
    from runbook.cli._observers import TextObserver

    with TextObserver(Console()) as observer:
        observer.run_started("id", LONG, ("baseline",))
        observer.phase_started("baseline", "Baseline", 3)
        observer.note(LONG)


def test_a_line_above_the_moving_one_is_not_cut_either(tmp_path: Path) -> None:
    text = in_terminal(draw_with_a_long_line)
    assert ESCAPE in text, "something was drawn"
    assert text.count(LONG) == 2
