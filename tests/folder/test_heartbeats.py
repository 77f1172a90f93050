"""Heartbeats: what a rank said is kept, what does not belong to it is named."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.folder.launch.rank_log import read_heartbeats
from runbook.launch.watch import RankWatch
from runbook.records.evidence import RankLog
from runbook.tools.inspect import RemarkCode
from runbook.tools.inspect.folder import inspect_heartbeats
from tests.factory.files import beat, heartbeats
from tests.tiers import examples, few


def read(folder: Path, data: str | bytes, *, rank: int = 0) -> RankLog:
    path = folder / f"heartbeat_rank{rank}.jsonl"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_heartbeats(path, rank=rank, relative_to=folder)


def test_truncation_at_every_byte_keeps_the_complete_lines(tmp_path: Path) -> None:
    data = heartbeats(2).encode()
    for length in few(range(len(data) + 1)):
        log = read(tmp_path, data[:length])
        whole = [json.loads(line) for line in data[:length].split(b"\n")[:-1]]
        assert log.events == len(whole)

        assert not log.damaged
        ends = [record["step"] for record in whole if record["event"] == "step_end"]
        assert log.counts.get("step_end", 0) == len(ends)


def test_damage_before_the_tail_is_named(tmp_path: Path) -> None:
    log = read(tmp_path, heartbeats(2) + '{"event": "pro\n' + "\0\0\n" + beat("boot", mono=99))
    assert log.damaged


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (heartbeats(1) + heartbeats(1, token="ff00"), "2 launches"),
        (heartbeats(1, rank=1), "other ranks"),
        (beat("boot", mono=5.0) + beat("boot", mono=4.0), "goes back at 1"),
        (beat("boot", pid=7) + beat("boot", pid=8), "2 processes in one file: 7, 8"),
    ],
)
def test_what_does_not_belong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    log = read(tmp_path, text)
    assert log.damaged
    assert any(problem in found for found in log.problems)


@pytest.mark.parametrize("code", [None, "0", True, 1.5])
def test_an_exit_that_cannot_say_its_code_is_a_crash_for_every_reader(
    tmp_path: Path, code: object
) -> None:
    text = heartbeats(3).rsplit("\n", 2)[0] + "\n" + beat("exit", step=3, code=code, reason="odd")
    log = read(tmp_path, text)
    watch = RankWatch(tmp_path, "ab12", time.monotonic())
    watch.update()
    watch.close()
    state = watch.ranks[0]
    facts, _, findings = inspect_heartbeats(
        tmp_path / "heartbeat_rank0.jsonl", rank=0, relative_to=tmp_path
    )
    assert (log.exit_code, log.exit_reason, log.last_step) == (1, "odd", 3)
    assert (state.exit_code, state.exit_reason, state.step) == (1, "odd", 3)
    assert (facts.exit_code, facts.last_event, facts.last_step) == (1, "exit", 3)
    assert RemarkCode.FAILED_EXIT in {finding.code for finding in findings}


@examples(300)
@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"event":1}'), st.just(b"{}"))))
def test_no_bytes_make_it_raise(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("noise")
    log = read(folder, b"\n".join([*lines, beat("boot").encode()]))
    assert log.events >= 1


def test_what_was_said_of_a_step_stands_beside_its_end(tmp_path: Path) -> None:
    """Said twice: the first counts. Said of no end: nowhere. Not said: no number."""
    said = [(4, 1.0), (2, 2.0), (2, 3.0), (9, 4.0)]
    text = "".join(beat("progress", step=step, loss=loss) for step, loss in said)
    text += "".join(beat("step_end", step=step) for step in (1, 2, 4, 4, 12))
    steps = read(tmp_path, text).steps
    assert steps is not None
    assert steps["step"].tolist() == [1, 2, 4, 4, 12]
    assert list(map(str, steps["loss"].tolist())) == ["nan", "2.0", "1.0", "1.0", "nan"]
    none = read(tmp_path, beat("step_end", step=1)).steps
    assert none is not None and none["loss"].isna().all()
