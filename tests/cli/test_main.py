"""`runbook` answers at once, says what there is, and names the nearest right word."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from runbook import __version__
from runbook.cli import COMMANDS, main
from runbook.cli._parser import SHORT_FORMS
from runbook.console import Console
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
        ("runbook schema | head -n 1; exit ${PIPESTATUS[1]}", 0, "{\n"),
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

    monkeypatch.setitem(COMMANDS, "schema", replace(COMMANDS["schema"], run=fail))
    return main(["schema"])


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


def test_what_the_machine_refuses_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (errno.ENOSPC, errno.EISDIR, errno.ENOTDIR):
        refused = OSError(number, os.strerror(number), "artifacts/x")
        assert broken(monkeypatch, refused) == 2
        assert capsys.readouterr().err == f"runbook: error: artifacts/x: {refused.strerror}\n"


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("yaml.py", "raise SystemExit(1)"),
        ("yaml/__init__.py", "safe_load = 1"),
        ("yaml.py", "1 / 0"),
        ("yaml.py", "import nothing"),
    ],
)
def test_whatever_a_module_in_the_place_of_a_package_does_it_is_named(
    tmp_path: Path, body: str, name: str
) -> None:
    """One that ends the program with 1 would say NO-GO."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{body}\n")
    ended = started("profiles", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (ended.code, ended.out) == (2, "")
    told = f"yaml is {tmp_path / name} here, which hides the package of that name: rename it"
    assert told in ended.err and "Traceback" not in ended.err


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
