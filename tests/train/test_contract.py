"""The contract: what it promises is what a real launch writes, whole, and into its own folder."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as c10d

from nsa import contract
from nsa.contract import COMMON_FIELDS, FLIGHTS, Event, ExitCode, Phase
from nsa.launch.envfile import redact
from nsa.launch.output import LineFile, RecordWriteError, plain, write_json
from nsa.launch.process import claim, leftovers, link_latest
from nsa.launch.ranks import SAVING_GROUP, parameter_hash, write_flight
from nsa.settings import ConfigError
from nsa.step.ddp import WireStats, compressed_all_reduce
from tests.factory.tables import table
from tests.train.launching import Launch, environment

MAY_BE_IMPORTED = ("nsa", "nsa.contract", "nsa.toggles", "nsa.settings", "nsa.torch_env")
HEAVY = {"numpy", "pandas", "scipy", "rich", "tensorboard", "datasets", "tiktoken", "pyarrow"}


# What the harness reads, and the trainer's own start, which loads torch and NumPy.
@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        *((f"import {name}", HEAVY | {"torch"}) for name in MAY_BE_IMPORTED),
        # A refusal does not wait for torch.
        ("from nsa.train.__main__ import main; assert main(['-b'], {}) == 2", HEAVY | {"torch"}),
        ("import nsa.train.session", HEAVY - {"numpy"}),
        # A second source of what torch computes has nothing of it.
        ("import nsa.witness.oracle", HEAVY - {"numpy"} | {"torch"}),
    ],
)
def test_what_is_not_used_is_not_loaded(words: str, heavy: set[str]) -> None:
    code = f"import sys\n{words}\nprint(sorted({heavy} & set(sys.modules)))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_two_links_lead_to_the_newest_launch_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` beside it, and that of the folder in which the harness has its runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        run_dir = tmp_path / "artifacts/prod" / name
        run_dir.mkdir(parents=True)
        link_latest(run_dir, "artifacts/prod")
        for link in ("artifacts/latest", "artifacts/prod/latest"):
            assert (tmp_path / link).resolve() == run_dir
    link_latest(tmp_path / "artifacts/prod/first", str(tmp_path / "artifacts/prod"))
    assert (tmp_path / "artifacts/latest").resolve().name == "second"
    (tmp_path / "artifacts/latest").unlink()
    (tmp_path / "artifacts/latest").write_text("mine")
    link_latest(run_dir, "artifacts/prod")
    assert (tmp_path / "artifacts/latest").read_text() == "mine"


def test_exit_codes_have_their_numbers_and_a_meaning() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 10, 11, 12, 13]
    assert all(code.meaning for code in ExitCode)


def test_files_of_a_rank_and_checkpoints_are_found_by_their_own_names() -> None:
    assert contract.checkpoint_step(contract.checkpoint_name(12)) == 12
    assert contract.checkpoint_step(".step_12.tmp") is None
    assert contract.HEARTBEATS.name(3) == "heartbeat_rank3.jsonl"
    assert contract.HEARTBEATS.rank_of("heartbeat_rank12.jsonl") == 12
    assert contract.HEARTBEATS.rank_of("heartbeat_rank1_old.jsonl") is None
    assert contract.STACKDUMPS.name(0, 4711) == "stackdump_rank0_4711.txt"
    assert contract.STACKDUMPS.rank_of("stackdump_rank0_outside.txt") == 0
    assert contract.STACKDUMPS.glob(1) == "stackdump_rank1_*.txt"
    assert contract.FLIGHTS.rank_of("flight_rank0.json.tmp") is None


class TestOfARealLaunch:
    pytestmark = pytest.mark.e2e

    def test_every_event_carries_the_fields_that_are_listed(
        self, everything: Launch, arms: Launch
    ) -> None:
        seen = set()
        launched = [launch.beats(rank) for launch in (everything, arms) for rank in (0, 1)]
        for beat in chain(*launched):
            event = Event(beat["event"])
            assert tuple(beat) == (*COMMON_FIELDS, *event.fields), event
            assert beat["phase"] in set(Phase)
            seen.add(event)
        missing = {"compiled", "ceiling_start", "nonfinite", "halt"}
        assert missing <= set(Event) - seen <= missing | {"data_start"}

    def test_the_tables_have_the_listed_columns(self, everything: Launch) -> None:
        for name, columns in (
            (contract.TRAINING_CSV, contract.TRAINING_COLUMNS),
            (contract.VAL_CSV, contract.VAL_COLUMNS),
            (contract.GATES_CSV, contract.GATES_COLUMNS),
        ):
            with (everything.run_dir / name).open(newline="") as file:
                rows = list(csv.DictReader(file))
            assert tuple(rows[0]) == contract.names(columns)
            for column in columns:
                if column.filled:
                    assert all(row[column.name] != "" for row in rows), column.name


@pytest.mark.parametrize(
    "name", ["training.csv", ".HALT", ".ENOUGH", "heartbeat_rank0.jsonl", "env.json"]
)
def test_a_directory_with_traces_of_a_launch_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"belongs to an earlier launch"):
        claim(tmp_path, 2)
    for other in ("launch.json", "console.log", "heartbeat_rank1.jsonl"):
        (tmp_path / other).touch()
    assert leftovers(tmp_path, world_size=2) == [name]
    assert {*leftovers(tmp_path, world_size=1)} == {name, "heartbeat_rank1.jsonl"}


def test_json_holds_no_bare_nan() -> None:
    told = {"a": "nan", "b": "-inf", "c": 1.5, "d": None}
    assert plain({"a": math.nan, "b": -math.inf, "c": 1.5, "d": None}) == told


def test_line_files_are_never_shared(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    LineFile(path).append("one")
    with pytest.raises(FileExistsError):
        LineFile(path)
    assert path.read_text() == "one\n"


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "no_such_folder" / "env.json"
    with pytest.raises(RecordWriteError, match=r"env\.json"):
        write_json(path, {})
    write_json(tmp_path / "env.json", {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["env.json"]


@table(__file__, "secrets")
def test_secrets_are_redacted(text: str, clean: str) -> None:
    assert redact(text) == clean


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


# A thread runs them in each rank's own time, under numbers that the steps have too.
OF_A_SAVE = ENTRY | {"process_group": ["1", SAVING_GROUP], "profiling_name": "gloo:scatter"}


def recorder(*entries: object) -> bytes:
    return json.dumps({"entries": entries}).encode()


@pytest.mark.parametrize(
    ("nccl", "generic", "op"),
    [
        (recorder(), recorder(ENTRY), "all_reduce"),
        (recorder(ENTRY | {"profiling_name": "nccl:broadcast"}), recorder(ENTRY), "broadcast"),
        (
            recorder(),
            recorder(ENTRY | {"process_group": ["0", "default_pg"]}, OF_A_SAVE),
            "all_reduce",
        ),
    ],
)
def test_gloo_on_a_machine_with_gpus_is_recorded_too_but_for_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: bytes, generic: bytes, op: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: nccl, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: generic)
    write_flight(tmp_path, rank=0, token="ab" * 16, reason="x")
    (entry,) = json.loads((tmp_path / FLIGHTS.name(0)).read_bytes())["entries"]
    assert entry[:2] == [1, op]
