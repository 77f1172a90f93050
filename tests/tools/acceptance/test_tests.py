"""The stage `tests` on real pytest runs: a skip is never a pass, and nothing runs twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from runbook.tools.acceptance.stages import TO_BE_CONTINUED
from runbook.tools.acceptance.tests import judge, marked_words
from tests.shared import crowded

ROOT = Path(__file__).parents[3]
GOOD = "def test_good(): pass\n"
SKIPPED = "import pytest\n@pytest.mark.skip(reason='no CUDA device')\ndef test_skipped(): pass\n"
BAD = "def test_bad(): assert 1 == 2\n"
BROKEN = (
    "import pytest\n@pytest.fixture\ndef x(): raise OSError('gone')\ndef test_broken(x): pass\n"
)


slow = partial(pytest.param, marks=pytest.mark.slow)


def run(folder: Path, code: str, *words: str, left_s: float = 60) -> tuple[int, dict[str, object]]:
    (folder / "test_it.py").write_text(code)
    command = [sys.executable, "-m", "runbook.tools.acceptance.tests", "--out", str(folder / "out")]
    done = subprocess.run(
        [*command, "--left-s", str(left_s), "-c", os.devnull, *words, str(folder / "test_it.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, cwd=folder, timeout=300,
        capture_output=True,
    )  # fmt: skip
    document: dict[str, object] = json.loads((folder / "out" / "result.json").read_text())
    return done.returncode, document


@pytest.mark.parametrize(
    ("code", "words", "wanted", "said"),
    [
        (GOOD, (), 0, "1 passed"),
        (GOOD + SKIPPED, (), 3, "which is not passed: Skipped: no CUDA device"),
        slow(SKIPPED, (), 3, "1 skipped, which is not passed"),
        slow(GOOD + BAD, (), 1, "1 passed, 1 failed"),
        slow(GOOD, ("-k", "nothing"), 3, "no test ran"),
        slow(BROKEN, (), 1, "1 failed"),
        slow("import nothing_like_it\n", (), 3, ""),
    ],
)
def test_what_counts(
    tmp_path: Path, code: str, words: tuple[str, ...], wanted: int, said: str
) -> None:
    got, document = run(tmp_path, code, *words)
    if not said:  # a module that cannot be imported: whatever else, no pass
        assert got in (1, 3)
        return
    assert (got, said in str(document["summary"])) == (wanted, True), document
    assert list((tmp_path / "out").glob("junit_1.xml"))


@pytest.mark.slow
def test_cut_off_in_the_middle_and_continued(tmp_path: Path) -> None:
    """What passed is kept and not repeated; the slow one runs in the next part."""
    log = tmp_path / "log"
    code = (
        f"import pathlib, time, os\nLOG = pathlib.Path({str(log)!r})\n"
        "def test_first(): LOG.open('a').write('first ')\n"
        "def test_slow():\n    LOG.open('a').write('slow ')\n"
        "    if not pathlib.Path(__file__).with_name('quick').exists(): time.sleep(60)\n"
    )
    began = time.monotonic()
    got, document = run(tmp_path, code, left_s=8)
    assert time.monotonic() - began < crowded(40)
    assert got == TO_BE_CONTINUED and document["summary"] == "1 passed so far"
    (tmp_path / "quick").write_text("")
    got, document = run(tmp_path, code)
    assert (got, document["summary"]) == (0, "2 passed")
    assert log.read_text().split() == ["first", "slow", "slow"]
    assert len(list((tmp_path / "out").glob("junit_*.xml"))) >= 1
    # Asked once more there is nothing left to run, which is no failure.
    got, document = run(tmp_path, code)
    assert (got, document["summary"]) == (0, "2 passed")


def test_a_bad_end_of_pytest_is_not_hidden_by_tests_that_passed() -> None:
    ends: dict[str, dict[str, object]] = {"a": {"test": "a", "outcome": "passed"}}
    assert judge(ends, 3)[0] == 1
    assert judge(ends, 0)[0] == 0
    assert judge({}, 0)[0] == 3


def test_the_marked_files_are_those_with_the_marker() -> None:
    words = marked_words("gpu", ROOT)
    assert words[:2] == ["-m", "gpu"]
    assert "tests/attention/test_on_a_gpu.py" in words
    assert all((ROOT / name).is_file() for name in words[2:])
    assert marked_words("no_such_marker", ROOT) == []
    assert marked_words("", ROOT) == []


@pytest.mark.slow
def test_without_a_device_the_gpu_tests_are_no_pass(tmp_path: Path) -> None:
    """The shipped words for a device, on this machine: skipped here, passed where there is one."""
    command = [sys.executable, "-m", "runbook.tools.acceptance.tests", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--marked", "gpu"], cwd=ROOT, check=False, timeout=200)
    ends = json.loads((tmp_path / "result.json").read_text())["tests"]
    outcomes = {end["outcome"] for end in ends}
    assert done.returncode == (0 if outcomes == {"passed"} else 3)
    assert len(ends) >= 7
