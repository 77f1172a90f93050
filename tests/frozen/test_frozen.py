"""What the program says of real runs is what it said when they were kept, row by row.

`python -m tests.frozen.accept` takes over a difference that is wanted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.shell import runbook
from tests.frozen import corpus
from tests.frozen.corpus import FROZEN, Said
from tests.shared import once
from tests.tiers import by_tier

# One that is well and one that is not; the others are in the long tier.
_FAST = ("go", "crash")
_HINT = "wanted? python -m tests.frozen.accept, and CHANGELOG.md tells it"


def said(factory: pytest.TempPathFactory, name: str) -> Said:
    """What is said today, asked once for all tests."""
    return once(factory, f"frozen-{name}", lambda new: corpus.asked(corpus.unpack(name, new)))


@pytest.mark.parametrize("name", by_tier(corpus.names(), _FAST.__contains__))
def test_a_real_run_is_judged_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    rows = corpus.rows_that_differ(corpus.expected(name), said(tmp_path_factory, name))
    if rows:
        pytest.fail("\n".join([f"{name}, differences: {len(rows)}; {_HINT}", *rows]), pytrace=False)


def test_an_edited_expectation_is_a_readable_difference(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    now = said(tmp_path_factory, "go")
    corpus.accept("go", now, tmp_path)
    assert corpus.rows_that_differ(corpus.expected("go", tmp_path), now) == []
    for path, old, new in (
        (tmp_path / "go.json", '"outcome": "PASS"', '"outcome": "FAIL"'),
        (tmp_path / "go.md", "GO", "STOP"),
    ):
        path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")
    row, *report = corpus.rows_that_differ(corpus.expected("go", tmp_path), now)
    assert row == 'judge phases preflight checks preflight.artifacts outcome: "FAIL" -> "PASS"'
    assert report[:2] == ["--- report then", "+++ report now"]
    assert [line[0] for line in report[3:]] == ["-", "+"] and "STOP" in report[3]


def test_every_kept_run_has_the_commands_that_made_it() -> None:
    assert corpus.names() == sorted(one.name for one in FROZEN)


@pytest.mark.slow
def test_a_run_verifies_alike_on_another_processor(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """NumPy and BLAS with AVX-512 and without: nothing changes where the processor has none."""
    folder = tmp_path_factory.mktemp("processors")
    run = corpus.unpack("go", folder)
    without = {
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
        "OPENBLAS_CORETYPE": "Haswell",
    }
    here, there = (runbook("verify", str(run), cwd=folder, **more) for more in ({}, without))
    assert (here.code, here.out) == (there.code, there.out)
    assert "measurement." not in here.out
