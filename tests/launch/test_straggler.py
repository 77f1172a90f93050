"""Who is named late: a rank, a node of several, nobody; by flight records made by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from runbook.folder.launch.documents import Load
from runbook.launch.incident import bundle, stopped_at
from runbook.launch.incident.flight import Straggler, find_straggler, read_flights
from runbook.records import End, LaunchStatus
from tests.factory.tables import table
from tests.launch.test_flight import BUS, GRAD, START, TOKEN, here, steps, watch, write


def test_a_straggler_is_the_one_who_is_late_in_every_step(tmp_path: Path) -> None:
    ops = steps(30)
    noise = random.Random(1)
    late = {seq: 0.020 + noise.random() * 0.003 for seq in range(3, len(ops) + 1, 2)}
    write(tmp_path, 0, [*ops, START[0]])
    write(tmp_path, 1, [*ops, START[0]], late=late)
    straggler = find_straggler(read_flights(tmp_path, token=TOKEN), here)
    assert straggler is not None and straggler.late == (1,)
    assert 0.020 <= straggler.lag_s <= 0.023
    assert straggler.text(None).startswith("straggler: rank 1 comes 2")


@table(__file__, "short_of_cpus")
def test_who_only_waits_for_a_cpu_is_no_straggler(
    tmp_path: Path, why: str, cpus: int, others: float, steal: float, blamed: bool
) -> None:
    """Two healthy ranks beside other work: the one whose CPU is shared comes late each time."""
    ops = steps(30)
    late = dict.fromkeys(range(3, len(ops) + 1, 2), 0.021)
    write(tmp_path, 0, ops)
    write(tmp_path, 1, ops, late=late)
    end = End(status=LaunchStatus.COMPLETED, cause="", culprit_rank=None)
    busy = Load(cpus=cpus, others=others, steal=steal, highest=1.0) if cpus else None
    _, _, (note,) = bundle(watch(tmp_path), end, console=[], load=busy, where=here)
    assert "rank 1 comes 21 ms late in each of 30 steps of" in note
    assert note.startswith("straggler: " if blamed else "short of CPUs: "), why
    assert blamed or "2 ranks ran while other work took " in note


def test_noise_and_turns_are_no_straggler(tmp_path: Path) -> None:
    ops = steps(30)
    noise = random.Random(2)
    for rank in (0, 1):
        write(tmp_path, rank, ops, late={s: noise.random() * 0.004 for s in range(len(ops) + 1)})
    assert find_straggler(read_flights(tmp_path, token=TOKEN), here) is None
    # Late by turns: both are slow in half of the steps, so neither is the straggler.
    late = dict.fromkeys(range(3, len(ops) + 1, 4), 0.03)
    other = dict.fromkeys(range(5, len(ops) + 1, 4), 0.03)
    write(tmp_path, 0, ops, late=late)
    write(tmp_path, 1, ops, late=other)
    assert find_straggler(read_flights(tmp_path, token=TOKEN), here) is None
    write(tmp_path, 0, steps(5))
    write(tmp_path, 1, steps(5), late=dict.fromkeys(range(3, 13), 0.5))
    assert find_straggler(read_flights(tmp_path, token=TOKEN), here) is None  # too few steps


# The second collective of each step is entered together: by then everybody was waited for.
STEPS = steps(30)
FIRST = range(3, len(STEPS) + 1, 2)


def on_nodes(
    folder: Path, late: dict[int, float], *, ahead: dict[str, float] | None = None
) -> Straggler | None:
    """Four ranks on two nodes; `late` s by rank at one of two collectives, clocks `ahead` s."""
    noise = random.Random(3)
    for rank in range(4):
        clock = (ahead or {}).get(f"n{rank // 2}", 0.0)
        shift = {seq: clock + noise.random() * 0.002 for seq in range(len(STEPS) + 1)}
        write(
            folder, rank, STEPS, late=shift | {seq: shift[seq] + late.get(rank, 0) for seq in FIRST}
        )
    return find_straggler(read_flights(folder, token=TOKEN), lambda rank: f"n{rank // 2}")


def test_the_node_is_named_where_all_of_its_ranks_are_late(tmp_path: Path) -> None:
    straggler = on_nodes(tmp_path, {2: 0.020, 3: 0.020})
    assert straggler is not None and straggler.late == (2, 3)
    assert straggler.text(None).startswith("straggler: node n1 (ranks 2, 3) comes ")
    # The same if one of them is always the last.
    straggler = on_nodes(tmp_path, {2: 0.020, 3: 0.030})
    assert straggler is not None and straggler.late == (2, 3)
    assert 0.017 < straggler.lag_s < 0.023


def test_a_clock_that_is_ahead_makes_no_straggler_and_hides_none(tmp_path: Path) -> None:
    assert on_nodes(tmp_path, {}, ahead={"n1": 0.5}) is None
    straggler = on_nodes(tmp_path, {2: 0.020, 3: 0.020}, ahead={"n1": 0.5})
    assert straggler is not None and straggler.node == "n1"
    assert 0.017 < straggler.lag_s < 0.023
    straggler = on_nodes(tmp_path, {2: 0.030, 3: 0.030}, ahead={"n0": 0.010})
    assert straggler is not None and straggler.node == "n1"


@pytest.mark.parametrize("twice", [(10,), (10, 11), (5, 6, 15, 16), (5, 6, 26, 27), (28, 29, 30)])
def test_steps_that_are_computed_twice_hide_no_straggler(
    tmp_path: Path, twice: tuple[int, ...]
) -> None:
    """The second computation has a collective of its own, at whatever step the token draws."""
    again = ("all_reduce", [[353]], ["Double"])
    ops, late = list(START), dict[int, float]()
    for step in range(1, 31):
        ops += [again] if step in twice else []
        late[len(ops) + 1] = 0.020
        ops += [GRAD, BUS]
    write(tmp_path, 0, [*ops, START[0]])
    write(tmp_path, 1, [*ops, START[0]], late=late)
    straggler = find_straggler(read_flights(tmp_path, token=TOKEN), here)
    assert straggler is not None and straggler.late == (1,)
    assert straggler.steps >= 30 - max(0, *(step - 25 for step in twice)) - len(twice)


def test_a_rank_stopped_in_code_of_its_own_not_in_what_that_calls(tmp_path: Path) -> None:
    frames = [
        '  File "<frozen importlib>", line 1 in load',
        '  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 9 in run',
        '  File "/home/me/mine/data.py", line 7 in fetch',
        '  File "/usr/lib/python3.11/threading.py", line 3 in wait',
        f'  File "{Path.cwd()}/nsa/train/loop.py", line 40 in one_step',
        '  File "/home/me/mine/train.py", line 2 in <module>',
    ]
    text = "Current thread 0x2 (most recent call first):\n" + "\n".join(frames) + "\n"
    (tmp_path / "stackdump_rank1_99.txt").write_text(text)
    end = End(status=LaunchStatus.HUNG, cause="hang", culprit_rank=1)
    assert stopped_at(tmp_path, end) == (
        "/home/me/mine/data.py:7 in fetch()",
        "nsa/train/loop.py:40 in one_step()",
    )
    assert stopped_at(tmp_path, replace(end, culprit_rank=0)) == ()
    assert stopped_at(tmp_path, replace(end, status=LaunchStatus.CRASHED)) == ()
