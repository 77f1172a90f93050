"""`runbook` answers at once, says what there is, and names the nearest right word."""

from __future__ import annotations

import argparse
import ast
import errno
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import chdir, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import runbook
from runbook import __version__
from runbook.cli import COMMANDS, main
from runbook.cli._parser import SHORT_FORMS
from runbook.cli.run.observers import LogConsole
from runbook.console import Console, drop, marked, rendered, table_of, whole
from tests.cli.shell import inside
from tests.cli.shell import runbook as started
from tests.factory.programs import program

HEAVY = ("torch", "numpy", "pandas", "scipy", "pydantic", "pydantic_core", "rich", "jinja2", "yaml")


def loaded_modules(tmp_path: Path, *words: str) -> set[str]:
    script = "import atexit, sys; atexit.register(lambda: print('@@', *sys.modules)); "
    script += "from runbook.cli import main; main(sys.argv[1:])"
    words = (sys.executable, "-P", "-c", script, *words)
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    return set(done.stdout.rpartition("@@")[2].split())


@pytest.mark.parametrize(
    ("words", "heavy", "bound"),
    [
        # Python with argparse alone loads about 70 modules.
        *((words, HEAVY, 135) for words in (["--help"], ["run", "--help"], ["--version"])),
        ([], HEAVY, 200),
        *(([name], ("torch",), 9999) for name in ("phases", "profiles", "report", "toggles")),
    ],
)
def test_no_command_imports_what_it_has_no_use_for(
    tmp_path: Path, words: list[str], heavy: tuple[str, ...], bound: int
) -> None:
    loaded = loaded_modules(tmp_path, *words)
    assert not loaded & set(heavy)
    assert len(loaded) < bound


def test_help_names_every_command_with_examples_and_exit_codes(tmp_path: Path) -> None:
    ended = inside("--help", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert inside("help", cwd=tmp_path).out == ended.out
    one = inside("help", "judge", cwd=tmp_path)
    assert (one.code, one.out) == (0, inside("judge", "--help", cwd=tmp_path).out)
    assert re.findall(r"^  ([a-z]+)  ", ended.out, re.MULTILINE)[: len(COMMANDS)] == [*COMMANDS]
    told = " ".join(ended.out.split())
    assert "0 GO, 1 NO-GO, 2 wrong usage, 3 INCOMPLETE, 4 PARTIAL PASS (of the phases" in told
    assert "70 internal error, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM" in told


def test_the_short_forms_are_the_same_on_every_command() -> None:
    seen = set()
    for command in COMMANDS.values():
        for action in command.parser()._actions:
            short = [text for text in action.option_strings if not text.startswith("--")]
            for long in set(action.option_strings) - set(short) - {"--help"}:
                assert short == ([SHORT_FORMS[long]] if long in SHORT_FORMS else []), command.name
                seen.add(long)
    assert set(SHORT_FORMS) < seen


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("runbook toggles --json | head -n 1; exit ${PIPESTATUS[1]}", 0, "{\n"),
        ("runbook toggles | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("runbook --version <&- >&- 2>&-", 0, ""),
        ("runbook nosuch 2>/dev/full", 2, ""),
        ("ulimit -f 0; runbook run --steps-scale 0.1 --phase preflight 2>told", 2, ""),
    ],
)
def test_a_stream_that_takes_nothing_is_no_defect_and_no_no_go(
    tmp_path: Path, line: str, code: int, said: str
) -> None:
    """Exit code 1 of Python's own traceback would read as NO-GO."""
    done = subprocess.run(
        ["bash", "-c", line.replace("runbook ", f'"{sys.executable}" -m runbook ', 1)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    """Run a command that raises `error`."""

    def fail(args: argparse.Namespace, console: Console) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "phases", replace(COMMANDS["phases"], run=fail))
    return main(["phases"])


def test_a_defect_is_never_a_no_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert broken(monkeypatch, ValueError("first\nsecond")) == 70
    (kept,) = tmp_path.iterdir()
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError" in line and line.endswith(f"(traceback: {kept})")
    assert kept.read_text().startswith(f"runbook {__version__}\nTraceback (most recent call last)")
    assert "in fail\n    raise error\n" in kept.read_text()


def test_a_python_that_drops_docstrings_has_the_same_help_and_options(tmp_path: Path) -> None:
    for words in (["--help"], ["run", "--help"], ["profiles"]):
        whole, bare = (started(*words, cwd=tmp_path, PYTHONOPTIMIZE=level) for level in ("", "2"))
        assert (bare.code, bare.out) == (0, whole.out)


def test_what_the_machine_refuses_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (errno.ENOSPC, errno.EISDIR, errno.ENOTDIR):
        refused = OSError(number, os.strerror(number), "artifacts/x")
        assert broken(monkeypatch, refused) == 2
        assert capsys.readouterr().err == f"runbook: error: artifacts/x: {refused.strerror}\n"


@pytest.mark.parametrize("content", ["raise SystemExit(1)", "x = 1"])
@pytest.mark.parametrize("name", ["yaml", "pydantic", "nsa"])
def test_a_stray_module_is_named(name: str, content: str, tmp_path: Path) -> None:
    """It may end the program, which must not say NO-GO."""
    stray = tmp_path / f"{name}.py"
    stray.write_text(content)
    found = started("profiles", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert found.code == 2 and f"{stray} hides " in found.err


_ENDS_WITH_3 = """
import subprocess, sys
from runbook.cli import main
main(["--version"])
sys.exit(subprocess.run(["bash", "-c", "exit 3"]).returncode)
"""


def test_a_shell_that_ignores_the_end_of_its_children_costs_no_exit_code() -> None:
    """Python takes each for 0 then: that of git where a branch has no upstream, and of a rank."""
    words = ["bash", "-c", "trap '' CHLD; exec \"$@\"", "bash", sys.executable, "-c", _ENDS_WITH_3]
    home = str(Path(__file__).parents[2])
    done = subprocess.run(words, check=False, env=os.environ | {"PYTHONPATH": home})
    assert done.returncode == 3


def test_a_folder_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    with chdir("gone"):
        (tmp_path / "gone").rmdir()
        assert main(["run", "--profile", "cpu", "--phase", "preflight"]) == 2
    assert "the current folder was removed; change to one that is there" in capsys.readouterr().err


BASH = """\
eval "$SCRIPT"
COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9
_python_argcomplete runbook
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_offers_what_may_follow(tmp_path: Path) -> None:
    why = "nsa-runbook[completion] is not installed"
    script = pytest.importorskip("argcomplete", reason=why).shellcode(["runbook"], True, "bash")
    program(tmp_path / "tools/runbook", f'exec {shlex.quote(sys.executable)} -P -m runbook "$@"')
    env = os.environ | {"PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}", "SCRIPT": script}
    env |= {"HOME": str(tmp_path), "LINE": "runbook run --dr"}
    words = ["bash", "--norc", "-c", BASH]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--dry-run"]


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
