"""Heartbeats read as columns are what line by line finds in them, whatever was done to it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tracemalloc
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.folder.launch import columns
from runbook.folder.launch.columns import Columns
from runbook.folder.launch.heartbeats import fold_file
from runbook.folder.launch.lines import WholeLines
from runbook.folder.launch.rank_log import RankHistory, rank_log
from tests.factory.files import beat, heartbeats
from tests.tiers import by_tier, examples


def stepping(steps: int) -> str:
    """What the trainer writes in each step, with full-length numbers."""
    text = beat("boot", phase="init")
    for step in range(1, steps + 1):
        common: dict[str, Any] = {"step": step, "mono": 100 + step * 0.1234567}
        text += beat("step_start", **common | {"phase": "data"}) + beat("fetched", **common)
        text += beat(
            "progress",
            **common,
            loss=5.5 / step,
            toks_per_s=1e4 / 7 * step,
            grad_norm=1e-7 * step,
            fetch_s=1e-3 / step,
        )
        text += beat(
            "step_end", **common, embedded=128, data=f"{step * 7919:016x}", mem_mib=344.8,
            reserved_mib=None, cpu_s=0.25 * step,
        )  # fmt: skip
    return text + beat("exit", code=0, reason="done", steps_done=steps, mono=1e3)


def read(path: Path, *, by_forms: bool, block: int = 4 << 20) -> dict[str, Any]:
    """All that is found in a file, with columns wherever they may be used, or without any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_WORTH", 1)
        patch.setattr(columns, "_OTHERS_SHARE", 1.0 if by_forms else -1.0)
        patch.setattr("runbook.folder.launch.lines._BLOCK_BYTES", block)
        fold = RankHistory(rank=0)
        sha256, torn = fold_file(path, fold)
        log = rank_log(fold, sha256=sha256, torn=torn, path=path.name)
    state = {name: value for name, value in vars(fold).items() if name not in ("_forms",)}
    state |= {f"log.{one.name}": getattr(log, one.name) for one in fields(log)}
    tables = ("ended", "progress", "started", "fetched", "again")
    return {name: value for name, value in state.items() if name not in tables}


def assert_same(path: Path, block: int = 4 << 20) -> None:
    fast, slow = read(path, by_forms=True, block=block), read(path, by_forms=False, block=block)
    steps, expected = fast.pop("log.steps"), slow.pop("log.steps")
    # As text: NaN is NaN, and 1 is neither 1.0 nor true.
    assert {name: repr(value) for name, value in fast.items()} == {
        name: repr(value) for name, value in slow.items()
    }
    assert (steps is None) == (expected is None)
    if expected is not None:
        pd.testing.assert_frame_equal(steps, expected, check_exact=True)


def columns_of(path: Path) -> list[Columns | None]:
    fold = RankHistory(rank=0)
    fold_file(path, fold)
    assert fold._forms is not None
    return [fold._forms.columns(block) for block in WholeLines(path)]


def test_nearly_all_lines_of_a_healthy_rank_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(stepping(300))
    (found,) = columns_of(path)
    assert found is not None
    assert len(found.forms) == 4
    assert (found.form < 0).nonzero()[0].tolist() == [0, 1201]
    assert_same(path)


def test_a_file_of_many_forms_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("".join(beat(f"event{i}", step=i) for i in range(300)))
    assert columns_of(path) == [None]
    assert_same(path)


ODD_NUMBERS = (
    "0", "00", "01", "0.5", "00.5", "1.", "1.e5", "1.5e", "1e5", "1E+05", "1e-05", "1e999", "1_0",
    "1 ", " 1", "+1", "-1", "-0", "-0.0", ".5", "0x1", "1.2.3", "1-2", "NaN", "Infinity", "null",
    "true", '"1"', "[1]", "{}", "1\\u0000", "\u0661", "123456789012345", "1234567890123456",
    "9007199254740993", "18446744073709551615", "18446744073709551616", "1.2345678901234567e-05",
    "0.00012345678901234567", "123456789012345678901.5", "1.00000000000000000000000000001", "1,2",
)  # fmt: skip


NAMES = ("step", "mono", "ts", "loss", "embedded", "mem_mib", "pid")


def _is_fast(place: tuple[str, str]) -> bool:
    name, number = place
    return name in ("mono", NAMES[ODD_NUMBERS.index(number) % len(NAMES)])


@pytest.mark.parametrize(
    "place",
    by_tier(itertools.product(NAMES, ODD_NUMBERS), _is_fast, lambda one: f"{one[0]}-{one[1]!a}"),
)
def test_a_number_of_any_text(tmp_path: Path, place: tuple[str, str]) -> None:
    """In one of many lines that are equal otherwise, and in the first of them.

    In the fast tier each number is the clock and one of the others, in the long one each of them.
    """
    name, number = place
    lines = stepping(8).splitlines()
    event = {"loss": "progress"}.get(name, "step_end")
    at = [i for i, line in enumerate(lines) if json.loads(line)["event"] == event]
    for line in (at[0], at[4]):
        told = json.loads(lines[line])[name]
        changed = list(lines)
        changed[line] = changed[line].replace(
            f'"{name}": {json.dumps(told)}', f'"{name}": {number}'
        )
        assert changed != lines
        path = tmp_path / "x"
        path.write_text("\n".join(changed) + "\n")
        assert_same(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"mono"', '"mon0"'),
        ('"step": 5', '"st3ep": 5'),
        ('"step": 5', '"stp": 5'),
        (', "step": 5', ', "step": 5, "step": 6'),
        ('"ab12"', '"ab13"'),
        ('"ab12"', '"ab,12"'),
        ('"rank": 0', '"rank": 1'),
        ('"rank": 0', '"rank": true'),
        ('"pid": 42', '"pid": 18446744073709551616'),
        ('"phase": "step"', '"phase": 7'),
        ('"phase": "step"', '"phase": ""'),
        ('"event": "step_end"', '"event": "halt"'),
        ('"event": "step_end"', '"event": ""'),
        ('"event": "step_end"', '"msg": "step_end"'),
        ('"event": "step_end"', '"event": "another"'),
        ('"data": "0', '"data": "X'),
        ('"data": "0', '"data": "A'),
        ('"data": "0', '"data": "'),
        ('"data": "0', '"data": "00'),
        ('"data": "', '"data": "\\u0030'),
        ('"cuda_mib": null', '"cuda_mib": [1,2]'),
        ("}", "} "),
        ("}", "}}"),
        ("}", ""),
        ("{", "\r{"),
        (" ", "\0"),
        (" ", "\x0b"),
        ("step", "\u00e9"),
    ],
)
def test_a_line_that_is_nearly_of_the_form(tmp_path: Path, old: str, new: str) -> None:
    lines = stepping(8).splitlines()
    path = tmp_path / "x"
    for place in range(17, 21):  # each event of step 5
        changed = list(lines)
        changed[place] = changed[place].replace(old, new, 1)
        path.write_text("\n".join(changed) + "\n")
        assert_same(path)


_HEALTHY = (stepping(6) + stepping(3) + heartbeats(4, rank=1)).encode()
_LINES = _HEALTHY.splitlines(keepends=True)
_BYTES = st.sampled_from([*b'0189.,-+eE_ "{}[]:\\n\r\n\0aZ', 0xE9]).map(lambda byte: bytes([byte]))
_EDITS = st.lists(
    st.tuples(st.integers(0, len(_HEALTHY)), st.integers(0, 2), st.one_of(st.just(b""), _BYTES)),
    max_size=8,
)


@examples(150)
@given(
    edits=_EDITS,
    order=st.none() | st.permutations(range(len(_LINES))),
    block=st.integers(100, 4000),
)
def test_whatever_is_done_to_a_file(
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[int, int, bytes]],
    order: list[int] | None,
    block: int,
) -> None:
    """Bytes replaced, put in and taken out, lines in another order, a cut anywhere."""
    data = _HEALTHY if order is None else b"".join(_LINES[i] for i in order)
    for place, size, new in edits:
        data = data[:place] + new + data[place + size :]
    path = tmp_path_factory.mktemp("edited") / "x"
    path.write_bytes(data)
    assert_same(path, block)
    assert_same(path)


@examples(100)
@given(st.lists(st.floats(min_value=0, allow_nan=False), min_size=4, max_size=40))
def test_every_number_is_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    path = tmp_path_factory.mktemp("floats") / "x"
    path.write_text("".join(beat("step_end", step=i, cpu_s=v) for i, v in enumerate(values)))
    steps = read(path, by_forms=True)["log.steps"]
    assert steps["cpu_s"].tolist() == values


def test_a_digest_and_a_torn_tail_of_a_file_in_small_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runbook.folder.launch.lines._BLOCK_BYTES", 3)
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo, which is long\n\nthr")
    lines = WholeLines(path)
    assert b"".join(lines) == b"one\ntwo, which is long\n\n"
    assert lines.torn == b"thr"
    assert lines.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_long_tail_of_nuls_is_read_in_one_pass_and_in_the_memory_of_a_line(
    tmp_path: Path,
) -> None:
    """96 MiB of them, behind two lines and before one."""
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo\n")
    os.truncate(path, 96 << 20)
    tracemalloc.start()
    lines = WholeLines(path)
    assert b"".join(lines) == b"one\ntwo\n"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (lines.torn_bytes, lines.endless, lines.unread) == ((96 << 20) - 8, 0, 0)
    assert peak < 80 << 20
    with path.open("ab") as stream:
        stream.write(b"end\nfour\n")
    lines = WholeLines(path)
    assert b"".join(lines) == b"one\ntwo\nfour\n"
    assert (lines.torn, lines.endless) == (b"", 1)
    assert lines.problems == [f"1 lines of over {16 << 20} bytes were dropped"]


def test_what_stands_behind_the_largest_log_is_not_read_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runbook.folder.launch.lines.LARGEST_LOG_BYTES", 10)
    path = tmp_path / "x"
    path.write_bytes(b"12345\n78\n0\n2\n")
    lines = WholeLines(path)
    assert b"".join(lines) == b"12345\n78\n"
    assert (lines.torn, lines.unread) == (b"0", 3)
    assert lines.problems == ["3 bytes behind the first 10 were not read"]
