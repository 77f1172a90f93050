"""The contract: what it promises is what a real launch writes, and reading it costs nothing."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest

from nsa import contract
from nsa.contract import COMMON_FIELDS, Event, ExitCode, Phase
from runbook.process import reaper
from tests.train.launching import Launch, environment

MAY_BE_IMPORTED = (
    "nsa",
    "nsa.contract",
    "nsa.toggles",
    "nsa.settings",
    "nsa.strict_yaml",
    "nsa.torch_env",
)
LAUNCHED = [pytest.mark.e2e]


HEAVY = {"numpy", "pandas", "scipy", "rich", "tensorboard", "datasets", "tiktoken", "pyarrow"}


# What the harness reads, and the trainer's own start, which loads torch and NumPy.
@pytest.mark.parametrize(
    ("name", "heavy"),
    [
        *((name, HEAVY | {"torch"}) for name in MAY_BE_IMPORTED),
        ("nsa.train.session", HEAVY - {"numpy"}),
    ],
)
def test_what_is_not_used_is_not_loaded(name: str, heavy: set[str]) -> None:
    code = f"import sys, {name}\nprint(sorted({heavy} & set(sys.modules)))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_reaper_which_may_import_nothing_knows_the_token_by_the_same_name() -> None:
    assert reaper.TOKEN_VARIABLE == contract.RUN_TOKEN_VARIABLE


def test_exit_codes_have_their_numbers_and_a_meaning() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 10, 11, 12, 13]
    assert all(code.meaning for code in ExitCode)


def test_files_of_a_rank_are_found_by_their_own_names() -> None:
    assert contract.HEARTBEATS.name(3) == "heartbeat_rank3.jsonl"
    assert contract.HEARTBEATS.rank_of("heartbeat_rank12.jsonl") == 12
    assert contract.HEARTBEATS.rank_of("heartbeat_rank1_old.jsonl") is None
    assert contract.STACKDUMPS.name(0, 4711) == "stackdump_rank0_4711.txt"
    assert contract.STACKDUMPS.rank_of("stackdump_rank0_outside.txt") == 0
    assert contract.STACKDUMPS.glob(1) == "stackdump_rank1_*.txt"
    assert contract.FLIGHTS.rank_of("flight_rank0.json.tmp") is None


def test_checkpoints_are_known_by_their_step() -> None:
    assert contract.checkpoint_step(contract.checkpoint_name(12)) == 12
    assert contract.checkpoint_step(".step_12.tmp") is None


class TestOfARealLaunch:
    pytestmark = LAUNCHED

    def test_every_event_carries_the_fields_that_are_listed(self, everything: Launch) -> None:
        seen = set()
        for rank in range(2):
            for beat in everything.beats(rank):
                event = Event(beat["event"])
                assert tuple(beat) == (*COMMON_FIELDS, *event.fields), event
                assert beat["phase"] in set(Phase)
                seen.add(event)
        missing = {
            Event.DATA_START,
            Event.COMPILED,
            Event.ARM_FAILED,
            Event.ENOUGH,
            Event.CEILING_START,
            Event.NONFINITE,
            Event.HALT,
        }
        assert missing - {Event.DATA_START} <= set(Event) - seen <= missing

    def test_an_arm_that_cannot_run_and_enough_are_told_as_listed(self, arms: Launch) -> None:
        for event in (Event.ARM_FAILED, Event.ENOUGH):
            (beat,) = arms.beats(0, event)
            assert tuple(beat) == (*COMMON_FIELDS, *event.fields)

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
