"""What ranks compare, what they send, and the flight record that each leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as c10d

from nsa.contract import FLIGHTS
from nsa.launch.ranks import SAVING_GROUP, parameter_hash, write_flight
from nsa.step.ddp import WireStats, compressed_all_reduce


def test_parameter_hash_sees_one_bit() -> None:
    one = torch.nn.Linear(3, 3)
    before = parameter_hash(one)
    assert before == parameter_hash(one)
    with torch.no_grad():
        one.bias[0] = torch.nextafter(one.bias[0], torch.tensor(10.0))
    assert parameter_hash(one) != before


def test_one_rank_rounds_as_several_do_and_sends_nothing() -> None:
    """There is no process group here: a collective would raise."""
    stats = WireStats(wire_dtype=torch.bfloat16, world_size=1)
    bucket = type("Bucket", (), {"buffer": lambda self: self.numbers})()
    bucket.numbers = torch.tensor([1.0, 1 + 2**-8 + 2**-9, -3e38])
    done = compressed_all_reduce(stats, bucket)
    assert done.wait() is bucket.numbers
    assert bucket.numbers.tolist() == [1.0, 1 + 2**-7, float(torch.tensor(-3e38).bfloat16())]
    assert stats.take()["bytes_after"] == 6
    stats.world_size = 2
    with pytest.raises(ValueError, match="process group"):
        compressed_all_reduce(stats, bucket)


ENTRY = {"collective_seq_id": 1, "profiling_name": "gloo:all_reduce", "time_created_ns": 5}


def recorder(*entries: object) -> bytes:
    return json.dumps({"entries": entries}).encode()


@pytest.mark.parametrize(
    ("nccl", "generic", "op"),
    [
        (recorder(), recorder(ENTRY), "all_reduce"),
        (recorder(ENTRY | {"profiling_name": "nccl:broadcast"}), recorder(ENTRY), "broadcast"),
    ],
)
def test_gloo_on_a_machine_with_gpus_is_recorded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: bytes, generic: bytes, op: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: nccl, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: generic)
    path = write_flight(tmp_path, rank=0, token="ab" * 16, reason="x")
    assert path == tmp_path / FLIGHTS.name(0)
    (entry,) = json.loads(path.read_bytes())["entries"]
    assert entry[:2] == [1, op]


def test_collectives_of_a_save_are_none_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread runs them in each rank's own time, under numbers that the steps have too."""
    step = ENTRY | {"process_group": ["0", "default_pg"]}
    save = ENTRY | {"process_group": ["1", SAVING_GROUP], "profiling_name": "gloo:scatter"}
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: recorder(step, save))
    path = write_flight(tmp_path, rank=0, token="ab" * 16, reason="x")
    assert path is not None
    assert [row[1] for row in json.loads(path.read_bytes())["entries"]] == ["all_reduce"]
