"""What is typed wrong is told in one line with what is right; nothing starts, nothing is made."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from runbook.folder.manifest import write_manifest, write_record
from tests.cli.shell import Ended, inside
from tests.reports import samples

RUN = samples.go().run_id
ENVIRONMENT = re.compile(r"[A-Z_]+=")
# What is typed, and how each line of the error begins.
TOGETHER = Path(__file__).with_name("refused_together.txt").read_text("utf-8").splitlines()
CASES = Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").splitlines()[1:]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A run, one whose record has no end, a pipe, a plan that is wrong in itself, and others."""
    run = tmp_path / "artifacts" / RUN
    run.mkdir(parents=True)
    write_record(run, samples.go())
    write_manifest(run)
    (tmp_path / "bad.yaml").write_text("extends: production\nphases: {smoke: {legs: 7}}\n")
    (tmp_path / "taken").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse/run.json").touch()
    os.truncate(tmp_path / "sparse/run.json", 1 << 40)
    return tmp_path


def refused(here: Path, *words: str, **variables: str) -> Ended:
    """Exit code 2, one line on stderr, nothing on stdout, and nothing made."""
    before = sorted(here.rglob("*"))
    ended = inside(*words, cwd=here, **variables)
    assert (ended.code, ended.out, sorted(here.rglob("*"))) == (2, "", before)
    *_, last = ended.err.splitlines()
    assert last.startswith("runbook: error: ") and "internal error" not in last
    return ended


@pytest.mark.parametrize("case", CASES)
def test_one_slip_is_one_problem(here: Path, case: str) -> None:
    """What it was typed for is not called missing as well."""
    typed, told = case.replace("HERE", str(here)).replace("RUN", RUN).split(" -> ")
    words = shlex.split(typed)
    variables = [word for word in words if ENVIRONMENT.match(word)]
    shell = dict(word.split("=") for word in variables)
    assert told in refused(here, *words[len(variables) :], **shell).err.splitlines()[-1]


@pytest.mark.parametrize("command", ["run", "launch", "triage", "report"])
def test_a_folder_is_one_line_of_text(here: Path, command: str) -> None:
    problem = r"--out: must be without line breaks and control characters, not 'x\nGO"
    assert problem in refused(here, command, "--out", "x\nGO (forged)").err


@pytest.mark.parametrize("name", ["NCCL_DEBUG_FILE", "data.local_path", "CONFIG"])
@pytest.mark.parametrize("command", ["run", "launch"])
def test_no_setting_prints_a_line_of_its_own(here: Path, command: str, name: str) -> None:
    ended = refused(here, command, "--dry-run", "--set", f"{name}=/x\nGO (forged)")
    assert f"--set {name}: must be without line breaks and control characters" in ended.err
    if name != "data.local_path":
        ended = refused(here, command, "--dry-run", **{name: "/x\x1b[2K\nGO (forged)"})
        assert f"in this shell: {name}: must be without line breaks" in ended.err


@pytest.mark.parametrize("words", [("--out", "\udcff"), ("--set", "NCCL_DEBUG_FILE=\udcff")])
def test_bytes_that_are_no_text_start_nothing(here: Path, words: tuple[str, ...]) -> None:
    ended = refused(here, "run", "--profile", "cpu", "--phase", "preflight", *words)
    assert "is not UTF-8 text (or the locale is not), and a run's files are" in ended.err


def test_everything_wrong_with_a_run_in_one_message(tmp_path: Path) -> None:
    typed, *expected = TOGETHER
    ended = inside(*shlex.split(typed), cwd=tmp_path)
    assert (ended.code, ended.out) == (2, "")
    first, *rest = ended.err.splitlines()
    assert first == "runbook: error: 10 problems:"
    for line, start in zip(rest, expected, strict=True):
        assert line.startswith(f"  - {start}")
    assert rest[-1].endswith("see runbook run --help")
    assert list(tmp_path.iterdir()) == [], "a refused run leaves nothing behind"


# Of each kind the first two places refuse new entries, also to root.
FOLDERS = ("/proc/x", "/sys/x", "taken/x")
MADE = (
    "drill --faults exit",
    "init --tokens-per-rank 8 --profile cpu --trainer 'true {steps}'",
    "run --phase preflight --profile cpu",
)


@pytest.mark.parametrize(("words", "place"), [*zip(MADE, FOLDERS, strict=True)])
def test_a_folder_that_cannot_be_made(here: Path, words: str, place: str) -> None:
    ended = refused(here, *shlex.split(words), "--out", place)
    told = f"error: --out ({here}/)?{place}[^ ]*: cannot be written: "
    assert re.search(told, ended.err)
    assert ended.err.endswith("; name a place that can be written\n")
