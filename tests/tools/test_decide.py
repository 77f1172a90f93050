"""`runbook decide`, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runbook.cli import main
from runbook.cli.questions import QUESTION_NAMES
from runbook.tools.decide import QUESTIONS

RNG = np.random.default_rng(0)


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["decide", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def blocks_csv(tmp_path: Path) -> str:
    rows = [
        f"{arm},{block},{speed * np.exp(RNG.normal(0, 0.005)):.4f}"
        for block in range(8)
        for arm, speed in (("25", 100), ("50", 106))
    ]
    return written(tmp_path, "blocks.csv", "arm,block,value", rows)


def written(folder: Path, name: str, header: str, rows: list[str]) -> str:
    path = folder / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def test_the_command_and_the_functions_know_the_same_questions() -> None:
    assert set(QUESTION_NAMES) == set(QUESTIONS)


def test_best_arm(capsys: pytest.CaptureFixture[str], blocks_csv: str) -> None:
    code, out, err = ask(capsys, "best-arm", blocks_csv)
    assert code == 0
    assert out.startswith("WINNER 50\n")
    assert err == ""


def test_json_names_the_file_and_its_digest(
    capsys: pytest.CaptureFixture[str], blocks_csv: str
) -> None:
    code, out, _ = ask(capsys, "best-arm", blocks_csv, "--json")
    document = json.loads(out)
    assert (code, document["outcome"], document["winner"]) == (0, "WINNER", "50")
    assert document["rows"] == 16
    assert len(document["sha256"]) == 64


def test_every_other_question(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    level = [f"{i},{8000 + RNG.normal(0, 3):.2f},{0.5 + RNG.normal(0, 0.01):.5f}"
             for i in range(1, 1201)]  # fmt: skip
    run = written(tmp_path, "run.csv", "step,mem_mib,dt_s", level)
    assert ask(capsys, "steady", run)[0] == 0
    memory = ("memory", run, "--project-to-step", "50000")
    assert ask(capsys, *memory, "--limit", "16000")[0] == 0
    assert ask(capsys, *memory, "--limit", "7000")[0] == 1
    launches = written(tmp_path, "l.csv", "value", ["40", "41", "42"])
    assert ask(capsys, "target", launches, "--target", "38")[0] == 0
    assert ask(capsys, "target", launches, "--target", "40.5")[0] == 3
    assert ask(capsys, "target", launches, "--target", "60")[0] == 1
    pairs = written(tmp_path, "p.csv", "t1,tN", ["100,190", "101,192", "99,188"])
    assert ask(capsys, "scaling", pairs, "--devices", "2")[0] == 0
    assert ask(capsys, "scaling", pairs, "--devices", "4")[0] == 1
    wide = written(tmp_path, "w.csv", "baseline,variant", ["100,100", "101,101.1", "99,98.9"])
    assert ask(capsys, "non-inferiority", wide)[0] == 0
    ab = written(tmp_path, "ab.csv", "a,b", ["100,90", "101,91", "99,89"])
    assert ask(capsys, "faster", ab)[1].startswith("PASS")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ("value\n", "a header but no rows"),
        ("value\n1\n1,2\n", "line 3: 2 cell(s), the header has 1"),
        ("value\n1\nfast\n-3\n", "line 3, column value: 'fast'; allowed: finite numbers above 0"),
        ("valeu\n1\n", "no column 'value' (did you mean 'valeu'?)"),
        (b"value\n\xff\xfe\n", "not UTF-8"),
        ('value\n"1\n', "unexpected end of data"),
        ("value\n105\n10", "line 3: does not end in a newline, so it may be cut off"),
        ("value\n1_000\n", "line 2, column value: '1_000'"),
    ],
)
def test_bad_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | bytes, says: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = ask(capsys, "target", str(path), "--target", "1")
    assert (code, out) == (2, "")
    assert says in err
    assert "bad.csv" in err


def test_quoted_cells_are_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [f'"{arm}, MB",{block},{v}' for block in range(8) for arm, v in ((25, 100), (50, 110))]
    path = written(tmp_path, "r.csv", '"arm","block","value"', rows)
    assert ask(capsys, "best-arm", path)[1].startswith("WINNER 50, MB")


def test_everything_wrong_with_the_options_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ask(capsys, "memory", "x.csv", "--limit", "many", "--margin", "0.1")
    assert code == 2
    for part in (
        "--limit: must be a number, not 'many'",
        "--project-to-step",
        "does not take --margin",
    ):
        assert part in err
    assert "did you mean 'steady'" in ask(capsys, "stedy", "x.csv")[2]


def test_the_command_line_module_imports_nothing_heavy() -> None:
    code = (
        "import sys, runbook.cli.questions;"
        "sys.exit(any(m in sys.modules for m in ('numpy','pandas','scipy','pydantic','yaml')))"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
