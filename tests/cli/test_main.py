"""`runbook` answers at once, says what there is, and names the nearest right word."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
import tempfile
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from runbook import __version__
from runbook.cli import COMMANDS, GROUPS, main
from runbook.cli._parser import SHORT_FORMS
from runbook.console import Console
from tests.cli.shell import inside, runbook

HEAVY = ("torch", "numpy", "pandas", "scipy", "pydantic", "pydantic_core", "rich", "jinja2", "yaml")
_FORMATS = "details, github, html, junit, md, terminal"


def loaded_modules(tmp_path: Path, *words: str) -> set[str]:
    script = (
        "import json, sys\n"
        "from runbook.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('@@' + json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    return set(json.loads(done.stdout.rpartition("@@")[2]))


@pytest.mark.parametrize(
    ("words", "bound"),
    [(["--help"], 135), (["run", "--help"], 135), (["--version"], 135), ([], 200)],
)
def test_help_imports_nothing_heavy(tmp_path: Path, words: list[str], bound: int) -> None:
    loaded = loaded_modules(tmp_path, *words)
    assert not loaded & set(HEAVY)
    # A bound on everything else: Python with argparse alone loads about 70 modules.
    assert len(loaded) < bound


@pytest.mark.parametrize("command", ["phases", "profiles", "report", "toggles"])
def test_no_command_of_the_harness_imports_torch(tmp_path: Path, command: str) -> None:
    assert "torch" not in loaded_modules(tmp_path, command)


def test_help_names_every_command_with_examples_and_exit_codes(tmp_path: Path) -> None:
    ended = inside("--help", cwd=tmp_path)
    assert ended.code == 0
    assert ended.err == ""
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= 100
    listed = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert [name for name in listed if name in COMMANDS] == list(COMMANDS)
    for command in COMMANDS.values():
        assert listed[command.name].endswith(f"  {command.help}")
    assert [line[:-1] for line in lines if line[:-1] in GROUPS] == list(GROUPS)
    assert "runbook run --dry-run" in ended.out
    for code in (*("0 GO", "1 NO-GO", "2 wrong usage", "3 INCOMPLETE"), "70 internal error"):
        assert f"{code}," in ended.out
    assert "4 PARTIAL PASS (of the" in ended.out
    assert "129 SIGHUP, 130 Ctrl-C, 143 SIGTERM\n" in ended.out


def test_help_is_a_command_too(tmp_path: Path) -> None:
    all_of_it = inside("help", cwd=tmp_path)
    assert (all_of_it.code, all_of_it.out) == (0, inside("--help", cwd=tmp_path).out)
    one = inside("help", "judge", cwd=tmp_path)
    assert (one.code, one.out) == (0, inside("judge", "--help", cwd=tmp_path).out)
    wrong = inside("help", "juge", cwd=tmp_path)
    assert wrong.code == 2
    assert "unknown command 'juge' (did you mean 'judge'?)" in wrong.err
    moved = inside("bundle", cwd=tmp_path)
    assert "unknown command 'bundle' (it is `runbook export --to bundle`)" in moved.err


def test_the_short_forms_are_the_same_on_every_command() -> None:
    seen = set()
    for command in COMMANDS.values():
        for action in command.parser()._actions:
            short = [text for text in action.option_strings if not text.startswith("--")]
            for long in set(action.option_strings) - set(short) - {"--help"}:
                assert short == ([SHORT_FORMS[long]] if long in SHORT_FORMS else []), command.name
                seen.add(long)
    assert set(SHORT_FORMS) < seen


def test_version(tmp_path: Path) -> None:
    ended = runbook("--version", cwd=tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, f"runbook {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rnu"],
            f"unknown command 'rnu' (did you mean 'run'?); commands: {', '.join(COMMANDS)}",
        ),
        (
            ["--versoin"],
            "unknown option --versoin (did you mean '--version'?); "
            "options of a command come after its name; see runbook --help",
        ),
        (
            ["phases", "--jsn"],
            "unknown option --jsn (did you mean '--json'?); see runbook phases --help",
        ),
        (
            ["report", "--format"],
            "--format: expected one argument; see runbook report --help",
        ),
        (
            ["report", "--format", "pdf,markdwn,html"],
            "2 problems:\n"
            f"  - --format 'pdf': no such format; there are: {_FORMATS}\n"
            f"  - --format 'markdwn': no such format; there are: {_FORMATS}; "
            "see runbook report --help",
        ),
        (
            ["export", "--to", "csv", "."],
            "--to csv .: is a folder; name a file in it; see runbook export --help",
        ),
        (
            ["report"],
            "no run in artifacts/; `runbook run` starts one, --out names another folder",
        ),
        (
            ["schema", "rum"],
            "document: invalid choice: 'rum' (choose from 'run', 'events', 'profile')",
        ),
    ],
)
def test_one_message_for_what_is_wrong(tmp_path: Path, words: list[str], message: str) -> None:
    ended = inside(*words, cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"runbook: error: {message}\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("decide target x.csv --target fast", "--target: must be a number, not 'fast'"),
        ("decide target x.csv --tagret 39", "unknown option --tagret (did you mean '--target'?)"),
        ("decide scaling x.csv --devices 0", "--devices: must be a whole number, 1 or more, not"),
        (
            "run --seed 1000000000000000",
            "--seed: must be a whole number, 0 or more, of at most 15 digits, not '1000",
        ),
        ("export --to csv", "--to: expected 2 arguments"),
        ("history --csv --otu x", "unknown option --otu (did you mean '--out'?)"),
        ("launch --profile cpu --until", "--until: expected one argument"),
        ("launch --phase smoke", "unknown option --phase (here it is --until)"),
        ("launch --dry-run --measure", "unknown option --measure (`runbook run` has it)"),
        ("launch --profile cpu --untl smoke", "unknown option --untl (did you mean '--until'?)"),
        (
            "init --trainer t --tokens-per-rank 0",
            "--tokens-per-rank: must be a whole number, 1 or more, not '0'",
        ),
    ],
)
def test_one_slip_is_one_problem(tmp_path: Path, words: str, problem: str) -> None:
    """What it was typed for is not called missing as well."""
    ended = inside(*words.split(), cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"runbook: error: {problem}")
    assert len(ended.err.splitlines()) == 1


def test_two_runs_to_compare_are_named(tmp_path: Path) -> None:
    ended = inside("compare", "20260101T000000Z-abc", cwd=tmp_path)
    assert ended.code == 2 and "name the two runs to compare; in artifacts/ there" in ended.err


def test_a_phase_of_a_plan_is_known_as_that(tmp_path: Path) -> None:
    ended = inside("run", "--phase", "smoke", "--dry-run", cwd=tmp_path)
    assert ended.code == 2 and "the plan has it: `runbook launch --until smoke`" in ended.err
    ended = inside("run", "--profile", "cpu", "--phase", "al", "--dry-run", cwd=tmp_path)
    assert "no phase 'al' (did you mean 'all'?)" in ended.err and "launch" not in ended.err


@pytest.mark.parametrize(
    "words",
    [
        "watch artifacts/latest --wait 3",
        "watch artifacts/latest --halts",
        "watch artifacts/latest --stop",
        "run --gpus 2",
        "launch --wait",
        "launch --without-og",
    ],
)
def test_no_option_that_acts_and_none_of_another_word_is_proposed(
    tmp_path: Path, words: str
) -> None:
    ended = inside(*words.split(), cwd=tmp_path)
    assert ended.code == 2 and "unknown option" in ended.err and "did you mean" not in ended.err


@pytest.mark.parametrize("command", ["run", "launch", "triage", "report"])
@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("", "must be a path, not ''"),
        ("x\nGO (forged)", r"must be without line breaks and control characters, not 'x\nGO"),
    ],
)
def test_a_folder_is_one_line_of_text(tmp_path: Path, command: str, out: str, problem: str) -> None:
    ended = inside(command, "--out", out, cwd=tmp_path)
    assert (ended.code, ended.out, list(tmp_path.iterdir())) == (2, "", [])
    assert ended.err.startswith(f"runbook: error: --out: {problem}")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["NCCL_DEBUG_FILE", "data.local_path", "CONFIG"])
@pytest.mark.parametrize("command", ["run", "launch"])
def test_no_setting_prints_a_line_of_its_own(tmp_path: Path, command: str, name: str) -> None:
    ended = inside(command, "--dry-run", "--set", f"{name}=/x\nGO (forged)", cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "") and len(ended.err.splitlines()) == 1
    assert f"--set {name}: must be without line breaks and control characters" in ended.err
    if name != "data.local_path":
        ended = inside(command, "--dry-run", cwd=tmp_path, **{name: "/x\x1b[2K\nGO (forged)"})
        assert (ended.code, ended.out) == (2, "") and len(ended.err.splitlines()) == 1
        assert f"in this shell: {name}: must be without line breaks" in ended.err


def test_everything_wrong_with_a_run_in_one_message(tmp_path: Path) -> None:
    ended = inside(
        *("run", "--phase", "basline,nope", "--profile", "h200x2", "--set", "NSA_DDP_BUKET_MB=5"),
        *("--set", "train.stepz=2", "--steps-scale", "abc", "--protocol", "bloks", "--sed", "3"),
        *("--gpu-hour-price", "-1", "--seed", "x"),
        cwd=tmp_path,
    )
    assert (ended.code, ended.out) == (2, "")
    first, *rest = ended.err.splitlines()
    assert first == "runbook: error: 10 problems:"
    expected = (
        "--steps-scale: must be a number above 0, not 'abc'",
        "--gpu-hour-price: must be a number, 0 or more, not '-1'",
        "--seed: must be a whole number, 0 or more, not 'x'",
        "unknown option --sed (did you mean '--seed'?)",
        "no profile 'h200x2' (did you mean 'h200x2_nvlink'?); there are: ",
        "--set NSA_DDP_BUKET_MB: no such toggle or config key (did you mean 'NSA_DDP_BUCKET_MB'?)",
        "--set train.stepz: no such toggle or config key (did you mean 'train.steps'?)",
        "no phase 'basline' (did you mean 'baseline'?); there are: ",
        "no phase 'nope'; there are: ",
        "--protocol 'bloks': no such protocol (did you mean 'blocks'?); "
        "there are: blocks, launches, single",
    )
    assert len(rest) == len(expected)
    for line, start in zip(rest, expected, strict=True):
        assert line.startswith(f"  - {start}")
    assert rest[-1].endswith("see runbook run --help")
    assert list(tmp_path.iterdir()) == [], "a refused run leaves nothing behind"


def test_options_beside_resume_are_refused_not_ignored(tmp_path: Path) -> None:
    ended = inside("run", "--resume", "x", "--set", "NSA_NVTX=1", "--aa", cwd=tmp_path)
    assert ended.code == 2
    assert "--set cannot be combined with --resume" in ended.err
    assert "--aa cannot be combined with --resume" in ended.err
    assert "no run 'x'" in ended.err


def test_an_empty_list_of_phases_is_not_all_of_them(tmp_path: Path) -> None:
    ended = inside("run", "--phase", "", "--profile", "cpu", "--dry-run", cwd=tmp_path)
    assert ended.code == 2 and "no phase ''; there are: all, " in ended.err


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    ended = inside("run", "--out", "taken", "--dry-run", cwd=tmp_path)
    assert ended.code == 2
    assert "--out taken: is a file, not a folder" in ended.err


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{sys.executable} -P -m runbook schema | head -n 1; echo ${{PIPESTATUS[0]}}",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[0] == "{"
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_defect_and_no_no_go(tmp_path: Path, closed: str) -> None:
    """Python has None for it, and exit code 1 of the traceback would read as NO-GO."""
    command = f'"{sys.executable}" -m runbook --version {closed}'
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (__version__ in done.stdout) is (closed == "2>&-")


@pytest.mark.parametrize(
    ("words", "limit"),
    [("nosuch 2>/dev/full", ""), ("run --steps-scale 0.1 --phase preflight 2>/dev/full", ""),
     ("run --steps-scale 0.1 --phase preflight 2>told", "ulimit -f 0; ")],
)  # fmt: skip
def test_a_disk_that_takes_no_more_words_is_no_no_go(
    tmp_path: Path, words: str, limit: str
) -> None:
    """The error about it cannot be told either, and Python's own exit code for that is 1."""
    done = subprocess.run(
        ["bash", "-c", f'{limit}exec "{sys.executable}" -m runbook {words}'],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    """Run a command that raises `error`."""

    def fail(args: argparse.Namespace, console: Console) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "schema", replace(COMMANDS["schema"], run=fail))
    return main(["schema"])


@pytest.mark.parametrize(
    "error", [KeyError("loss"), ValueError("first\nsecond"), FileNotFoundError(2, "gone", "x")]
)
def test_a_defect_is_never_a_no_go(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert broken(monkeypatch, error) == 70
    (kept,) = tmp_path.iterdir()
    (line,) = capsys.readouterr().err.splitlines()
    assert type(error).__name__ in line and line.endswith(f"(traceback: {kept})")
    assert kept.read_text().startswith(f"runbook {__version__}\nTraceback (most recent call last)")
    assert "in fail\n    raise error\n" in kept.read_text()


def test_a_defect_without_room_for_its_traceback_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert broken(monkeypatch, KeyError("loss")) == 70
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].endswith("KeyError: 'loss' (traceback: above)")


def test_what_the_machine_refuses_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (errno.ENOSPC, errno.EISDIR, errno.ENOTDIR):
        refused = OSError(number, os.strerror(number), "artifacts/x")
        assert broken(monkeypatch, refused) == 2
        assert capsys.readouterr().err == f"runbook: error: artifacts/x: {refused.strerror}\n"


def test_a_folder_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    with chdir("gone"):
        (tmp_path / "gone").rmdir()
        assert main(["run", "--profile", "cpu", "--phase", "preflight"]) == 2
    assert "the current folder was removed; change to one that is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--profile", "cpu", "--phase", "preflight", "--out", "\udcff"),
        ("run", "--profile", "cpu", "--phase", "preflight", "--set", "NCCL_DEBUG_FILE=\udcff"),
    ],
)
def test_bytes_that_are_no_text_start_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = inside(*words, cwd=tmp_path)
    assert ended.code == 2 and list(tmp_path.iterdir()) == []
    assert "is not UTF-8 text, and a run's files are" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ("profiles", "./pipe.yaml"),
        ("run", "--profile", "./pipe.yaml", "--dry-run"),
        ("launch", "--plan", "./pipe.yaml", "--profile", "cpu", "--dry-run"),
        ("nightly", "--pin", "pipe.yaml", "--dry-run"),
        ("inspect", "pipe.yaml"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_told(tmp_path: Path, words: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    ended = inside(*words, cwd=tmp_path)
    assert ended.code == 2 and "save it as a file" in ended.err


# The first two refuse new folders, also to root.
@pytest.mark.parametrize("out", ["/sys/runs", "/proc/runs", "file/runs"])
def test_out_that_cannot_be_written(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    ended = inside("run", "--phase", "preflight", "--profile", "cpu", "--out", out, cwd=tmp_path)
    assert ended.code == 2
    said = ended.err.splitlines()[-1]
    assert said.startswith(f"runbook: error: --out {tmp_path.joinpath(out)}: no folder can be made")
    assert "Traceback" not in ended.err
