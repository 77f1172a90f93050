"""A run on a real terminal and in a real pipe: what is drawn, what is written, what never is."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.cli.run.text import TextObserver
from runbook.console import Console
from tests.cli.terminal import in_terminal
from tests.cli.test_observers import Clock, running
from tests.reports import samples

ESCAPE, CURSOR = "\x1b", "\x1b[J"
PLAIN = {"TERM": "xterm-256color", "CI": None, "NO_COLOR": None, "FORCE_COLOR": None}
ROOT = Path(__file__).parents[2]


def show_a_launch() -> None:
    clock = Clock()
    with TextObserver(Console(), clock=clock) as observer:
        running(observer, clock)
        observer.show()
        observer.note("between")
        observer.phase_finished(samples.no_go().phases[1])
        observer.show()


# Whether a terminal, or a pipe, gets colors and lines that are redrawn.
@pytest.mark.parametrize(
    ("variables", "color", "redrawn"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, True),
        ({"CI": "true"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, False),
    ],
)
def test_on_a_terminal(variables: dict[str, str], color: bool, redrawn: bool) -> None:
    written = in_terminal(show_a_launch, variables=PLAIN | variables)
    assert ("\x1b[31m" in written) is color
    assert (CURSOR in written) is redrawn


def list_phases() -> None:
    assert main(["phases"]) == 0


@pytest.mark.parametrize("columns", [60, 100])
def test_a_table_has_the_width_of_its_terminal_and_whole_words(columns: int) -> None:
    whole = in_terminal(list_phases, columns=10_000, variables=PLAIN)
    narrow = in_terminal(list_phases, columns=columns, variables=PLAIN)
    assert max(map(len, whole.splitlines())) > 100
    assert max(map(len, narrow.splitlines()[:-1])) <= columns  # the last line is none of it
    assert set(narrow.split()) == set(whole.split())


needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Screen:
    """A terminal in tmux, under a server of its own."""

    def __init__(self, socket: Path, columns: int, *command: str) -> None:
        self._tmux = ("tmux", "-S", str(socket), "-f", "/dev/null")
        variables = ["env", "-u", "CI", "-u", "NO_COLOR"]
        self._do(
            "new-session", "-d", "-x", str(columns), "-y", "24", shlex.join([*variables, *command])
        )

    def _do(self, *words: str) -> str:
        done = subprocess.run((*self._tmux, *words), capture_output=True, text=True, check=True)
        return done.stdout

    def lines(self) -> list[str]:
        return [line for line in self._do("capture-pane", "-p").splitlines() if line]

    def resize(self, columns: int) -> None:
        self._do("resize-window", "-x", str(columns), "-y", "24")

    def close(self) -> None:
        self._do("kill-server")

    def wait_for(self, *words: str) -> list[str]:
        """The screen once its lines hold all the words."""
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            if all(any(word in line for line in self.lines()) for word in words):
                return self.lines()
            time.sleep(0.1)
        raise AssertionError(f"{words} never came: {self.lines()}")


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    program = (sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {_KEPT}")
    shown = Screen(tmp_path / "tmux", 80, *program)
    yield shown
    shown.close()


_KEPT = "from tests.cli.test_live_terminal import keep_showing; keep_showing()"


def keep_showing() -> None:
    clock = Clock()
    with TextObserver(Console(), clock=clock) as observer:
        running(observer, clock)
        observer.note("above")
        time.sleep(60.0)


@needs_tmux
def test_the_screen_of_a_terminal_that_changes_its_width(screen: Screen) -> None:
    lines = screen.wait_for("2 min 40 s left", "step 30/100")
    assert lines[0].startswith("runbook ") and lines[1].strip() == "above"
    assert len(lines) == 5, "what was drawn before is gone"
    for columns, last in ((40, "ranks 2/2"), (20, "step 30/100"), (200, "so far")):
        screen.resize(columns)
        lines = screen.wait_for(last, "step 30/100")
        assert sum("step 30/100" in line for line in lines) == 1, lines
        assert all(len(line) <= columns for line in lines)
