"""A run directory as evidence: what a rank said is kept, what is damaged or foreign is named."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nsa.contract import THREAD_VARIABLES, Ceiling, Event, is_secret_name
from phases.machine.device_changes import DEVICE_COUNTERS
from runbook.folder.facts import REDACTED, recorded_environment, redact_diff, redact_text
from runbook.folder.launch import heartbeats_in, whole_number
from runbook.folder.launch.documents import read_console, read_json_object
from runbook.folder.launch.evidence import read_launch
from runbook.folder.launch.rank_log import RankLines, read_heartbeats
from runbook.folder.launch.shapes import shape_of, shaped
from runbook.launch.watch import RankWatch
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import RankLog
from runbook.tools.inspect import RemarkCode
from runbook.tools.inspect.folder import inspect_heartbeats
from tests.factory import records
from tests.factory.files import beat, heartbeats, training
from tests.factory.tables import table
from tests.tiers import examples

RESULT = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token="ab12")


def launch() -> Launch:
    return records.launch("python", name="base")


def test_earlier_starts_are_found_beside_the_launch_and_beside_its_phase(
    tmp_path: Path, folder: Path
) -> None:
    """The first one ended a step at 2 s of its rank's clock and said its last word at 7 s."""
    for name, at in (("baseline/base.unfinished1", "18"), ("baseline.repeated1/base", "16")):
        aside = tmp_path / name
        aside.mkdir(parents=True)
        (aside / "launch.json").write_text(json.dumps({"started_at": f"2023-11-14T22:13:{at}Z"}))
        (tmp_path / "baseline" / "base2").mkdir(exist_ok=True)
    (aside / "heartbeat_rank0.jsonl").write_text(heartbeats(5))
    first, second = read_launch(tmp_path, launch(), RESULT).aside
    assert (first.folder, first.began) == ("baseline.repeated1/base", 1_699_999_996.0)
    assert (first.first_step, first.ended) == (1_700_000_002.0, 1_700_000_007.0)
    assert (second.first_step, second.ended) == (None, second.began)

    (aside / "launch.json").write_text('{"started_at": "yesterday"}')
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert [one.folder for one in evidence.aside] == ["baseline/base.unfinished1"]
    assert evidence.problems == (
        "baseline.repeated1/base/launch.json: when it was started cannot be read",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "baseline" / "base"
    path.mkdir(parents=True)
    (path / "training.csv").write_text(training(5))
    for rank in range(2):
        (path / f"heartbeat_rank{rank}.jsonl").write_text(heartbeats(5, rank=rank))
    return path


def test_what_a_test_says_of_itself_is_read_wherever_it_stands(
    tmp_path: Path, folder: Path
) -> None:
    """The first of error, failure and skip; in its attribute, or else in its text."""
    told = ("<error message='m'/><skipped/>", "<failure message=''> t </failure>", "<skipped/>", "")
    cases = "".join(f"<testcase name='{at}' classname='c'>{one}</testcase>" for at, one in
                    enumerate(told))  # fmt: skip
    (folder / "junit.xml").write_text(f"<testsuite>{cases}</testsuite>")
    found = read_launch(tmp_path, launch(), RESULT).junit
    assert found is not None
    assert [(one.name, one.classname, one.status, one.message) for one in found.cases] == [
        ("0", "c", "error", "m"), ("1", "c", "failed", "t"), ("2", "c", "skipped", ""),
        ("3", "c", "passed", ""),
    ]  # fmt: skip


DAMAGED = yaml.safe_load(Path(__file__).with_name("damaged.yaml").read_text("utf-8"))
DEEP = pytest.param("env.json", "[" * 100_000, "env.json is not JSON: ", id="nested")


@pytest.mark.parametrize(("name", "text", "says"), [*DAMAGED, DEEP])
def test_what_is_damaged_is_named_with_its_file_and_not_read(
    tmp_path: Path, folder: Path, name: str, text: str, says: str
) -> None:
    (folder / name).write_text(text)
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert any(name in one and says in one for one in evidence.problems), evidence.problems
    read = {"env.json": (evidence.env or {}).get("world_size"), "junit.xml": evidence.junit}
    assert read.get(name) is None


SHAPE = {"n": "count", "deep": {"t": "text"}, "each": {"*": "finite"}, "items": ["text"]}


@table(__file__, "shapes")
def test_what_does_not_fit_is_left_out(
    bad: dict[str, Any], kept: dict[str, Any], says: list[str]
) -> None:
    assert shaped(bad, SHAPE, "d") == (kept, says)


def test_the_shapes_name_what_others_name() -> None:
    (ranks,), (gpus,) = shape_of("ceilings")["ranks"], shape_of("devices_before")["gpus"]
    events = shape_of("events")
    assert set(Ceiling) <= ranks.keys() and events.keys() <= set(Event)
    assert gpus["counters"].keys() == DEVICE_COUNTERS.keys()
    assert tuple(events["exit"]["in_force"]["variables"]) == THREAD_VARIABLES


def test_a_document_of_up_to_64_mib_is_read(tmp_path: Path) -> None:
    path, most, problems = tmp_path / "env.json", 64 << 20, list[str]()
    path.write_bytes(b'{"a": 1}'.ljust(most))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_json_object(path, problems) == ({"a": 1}, sha256)
    os.truncate(path, most + 1)
    assert read_json_object(path, problems) == (None, "")
    assert problems == [f"env.json has {most + 1} bytes, at most {most} are read"]


@pytest.mark.parametrize(("lines", "left_out"), [(8_000, 0), (8_003, 3)])
def test_of_a_long_console_the_first_and_the_last_4000_lines_are_kept(
    tmp_path: Path, lines: int, left_out: int
) -> None:
    path = tmp_path / "console.log"
    text = [f"line {number}" for number in range(lines)]
    path.write_text("\n".join(text) + "\r\n")
    kept, sha256 = read_console(path)
    middle = [f"... {left_out} lines left out ..."] if left_out else []
    assert list(kept) == [*text[:4_000], *middle, *text[max(4_000, lines - 4_000) :]]
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def read(folder: Path, data: str | bytes, *, rank: int = 0) -> RankLog:
    path = folder / f"heartbeat_rank{rank}.jsonl"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_heartbeats(path, rank=rank, relative_to=folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (heartbeats(1) + heartbeats(1, token="ff00"), "2 launches"),
        (heartbeats(1, rank=1), "other ranks"),
        (heartbeats(2) + '{"event": "pro\n' + "\0\0\n" + beat("boot"), "2 unreadable lines"),
        (beat("boot", pid=7) + beat("boot", pid=8), "2 processes in one file: 7, 8"),
        (beat("boot") + beat("eval", loss="low"), "eval.loss has an unexpected value: 'low'"),
    ],
)
def test_what_does_not_belong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    log = read(tmp_path, text)
    assert log.damaged
    assert any(problem in found for found in log.problems)


@pytest.mark.parametrize("code", [None, True])
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


KEPT = 4096


def test_clocks_go_back_only_within_one_process(tmp_path: Path) -> None:
    """Lines without a clock between them change nothing."""
    lines = (
        beat("step_end", mono=10.0, ts=100.0),
        beat("step_end", mono=10.0, ts=100.0),
        json.dumps({"event": "boot", "pid": 42, "ts": "noon"}) + "\n",
        beat("step_end", mono=9.0, ts=107.5),
        beat("step_end", mono=2.0, ts=104.0, pid=43),
        beat("step_end", mono=17.0, ts=106.0, pid=43),
    )
    found = read(tmp_path, "".join(lines))
    assert (found.clocks_back, found.silence_s) == (2, 7.5)
    assert "the monotonic clock goes back at 1 places" in found.problems
    assert (found.clock_s, found.last_ts, list(found.pids)) == (7.0, 106.0, [42, 43])


def test_the_name_of_an_event_of_another_trainer(tmp_path: Path) -> None:
    records = ({"msg": "hi", "token": 1, "rank": 0}, {"event": 5, "rank": 7}, {"rank": 0})
    found = read(tmp_path, "".join(json.dumps(record) + "\n" for record in records))
    assert (found.events, found.last_event, found.counts) == (1, "", {"hi": 1})
    assert list(found.tokens) == ["1"]
    assert found.problems[:2] == (
        "heartbeats of other ranks in the file: [7]",
        "2 unreadable lines were dropped",
    )


@table(__file__, "how_far")
def test_how_far_it_went(tmp_path: Path, told: list[object], found: list[int | None]) -> None:
    """An evaluation is no step of the training; its step stands all the same."""
    text = [beat("boot"), *(beat("step_end", step=step) for step in told), beat("eval", step=9)]
    said = read(tmp_path, "".join(text))
    assert [said.first_step, said.last_step, said.steps_back] == found


@table(__file__, "bits")
def test_a_whole_number_fits_into_64_bits(value: object, found: int | None) -> None:
    assert whole_number(value) == found


def test_lines_that_only_look_like_records_are_dropped_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runbook.folder.launch._BLOCK_BYTES", 64)
    path = tmp_path / "heartbeat_rank0.jsonl"
    outside = json.dumps({"event": "checkpoint", "path": "\udcff"}) + "\n"
    path.write_text(beat("boot") + "{no json}\n[]\n\n" + outside + beat("step_end") + '{"event')
    found = RankLines.read(path, rank=0)
    assert (found.lines, found.dropped, found.torn_bytes) == (3, 2, len('{"event'))
    assert found.kept["checkpoint"][0]["path"] == "\udcff"
    read = " ".join(record["event"] for record in heartbeats_in(path))
    assert read == "boot checkpoint step_end"
    path.write_text(beat("boot")[:-1])
    assert list(heartbeats_in(path)) == []


# What of it is evidence


@pytest.mark.parametrize("many", [KEPT, KEPT + 1])
def test_of_rare_events_so_many_are_kept_and_the_last_one(tmp_path: Path, many: int) -> None:
    told = [str(number) for number in range(1, many + 1)]
    text = (beat("effect", toggle=name) + beat("arm_failed", arm=name) for name in told)
    log = read(tmp_path, "".join(text))
    assert [effect.toggle for effect in log.effects] == told[:KEPT]
    assert [failure["arm"] for failure in log.arm_failures] == [*told[: KEPT - 1], told[-1]]
    assert log.counts == {"effect": many, "arm_failed": many}


CANARY = "canary-0f1e2d3c4b5a"
KNOWN = yaml.safe_load(Path(__file__).with_name("secrets.yaml").read_text("utf-8"))
SECRETS, OTHERS = KNOWN["names"].split(), KNOWN["other_names"].split()


@pytest.mark.parametrize("name", SECRETS + OTHERS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name) is (name in SECRETS)


@pytest.mark.parametrize("environ", KNOWN["environments"])
def test_the_canary_dies_in_any_text(environ: dict[str, str]) -> None:
    text = f"log: got {CANARY} from the environment, and {CANARY}-suffix again"
    cleaned = redact_text(text, environ)
    assert CANARY not in cleaned and cleaned.count(REDACTED) == 2


@pytest.mark.parametrize(("text", "part"), KNOWN["shapes"])
def test_shapes_of_secrets_need_no_variable(text: str, part: str) -> None:
    cleaned = redact_text(text, {})
    assert REDACTED in cleaned and part in text and part not in cleaned


def test_only_what_decides_training_is_recorded() -> None:
    environ = {name: value for name, value, _ in KNOWN["recorded"]}
    kept = {name: left for name, _, left in KNOWN["recorded"] if left is not None}
    assert recorded_environment(environ) == kept


@pytest.mark.parametrize(("value", "blanked"), [("12345", False), ("123456", True)])
def test_a_secret_has_six_characters(value: str, blanked: bool) -> None:
    """A shorter one would blank ordinary words."""
    cleaned = f"got {REDACTED if blanked else value}"
    for environ in ({"X_TOKEN": value}, {"X": f"http://me:{value}@host"}):
        assert redact_text(f"got {value}", environ) == cleaned


@pytest.mark.parametrize("case", KNOWN["diff"])
def test_a_diff_shows_no_value_beside_the_name_of_a_secret(case: list[str]) -> None:
    assert redact_diff(f"+{case[0]}\n", {}) == f"+{case[-1]}\n"
