"""training.csv: complete rows are read exactly, everything else is named and left out."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.folder.launch.evidence import read_training_csv
from runbook.records.evidence import TrainingLog
from tests.factory.files import HEADER, legacy, row, training
from tests.tiers import examples, few


def read(folder: Path, data: str | bytes) -> TrainingLog:
    path = folder / "training.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_training_csv(path, relative_to=folder)


@examples(200)
@given(st.lists(st.floats(allow_nan=False, width=64), min_size=1, max_size=20))
def test_every_float_is_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    lines = [f"{i},{value!r},0.1,1.0" for i, value in enumerate(values, start=1)]
    text = "step,loss,lr,toks_per_s\n" + "\n".join(lines) + "\n"
    log = read(tmp_path_factory.mktemp("csv"), text)
    assert list(log.frame["loss"]) == values


@pytest.mark.parametrize("text", [training(12), legacy(12)], ids=["header", "headerless"])
def test_truncation_at_every_byte_keeps_the_complete_rows(tmp_path: Path, text: str) -> None:
    data = text.encode()
    first = 1 if text.startswith("step") else 0
    for length in few(range(len(data) + 1)):
        log = read(tmp_path, data[:length])
        whole = data[:length].decode().split("\n")[:-1][first:]
        assert list(log.frame["step"]) == [int(line.split(",")[0]) for line in whole]
        assert list(log.frame["toks_per_s"]) == [float(line.split(",")[3]) for line in whole]
        torn = length > 0 and data[length - 1 : length] != b"\n"
        assert log.dropped_rows == int(torn)
        assert not log.damaged


def test_two_writers_are_damage(tmp_path: Path) -> None:
    lines = [HEADER, *(row(step) for step in range(1, 20) for _writer in range(2))]
    log = read(tmp_path, "\n".join(lines) + "\n")
    assert log.damaged
    assert any("several runs, two writers, or rows written twice" in text for text in log.problems)


@examples(300)
@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    read(folder, noise)
    log = read(folder, training(3).encode() + noise)
    assert list(log.frame["step"])[:3] == [1, 2, 3]


def test_blocks_of_the_file_do_not_change_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = training(40)
    whole = read(tmp_path, text).frame
    monkeypatch.setattr("runbook.folder.launch.lines._BLOCK_BYTES", 37)
    pd.testing.assert_frame_equal(read(tmp_path, text).frame, whole)
