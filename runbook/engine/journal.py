"""run.json from the journal: a pure function of the events, however many there are so far."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runbook.engine.judge import missing_phases, reasons_for
from runbook.engine.ongoing import EVENTS_FILE, Event
from runbook.engine.scope import caveats_of, scope_of
from runbook.errors import RunbookError
from runbook.files import read_given, sync_folder, utc_text
from runbook.records import ArtifactRecord, PhaseRecord, RunRecord, judge_run
from runbook.records.run import Invocation, Repeated

# What a run ends with for now; both list every file with its digest.
ENDS = ("run_finished", "run_interrupted")


class Journal:
    """Appends one line per event; `sync=True` also waits for the disk.

    An event that was written is never changed. A torn last line, which only a crash leaves, is
    cut off when the journal is opened again, because nothing may be appended to half a line.
    """

    def __init__(self, path: Path, events: list[Event]) -> None:
        self.path = path
        self.events = events
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            # Held as long as the run goes on: nobody else continues it, or removes it.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise RunbookError(f"{path.parent.name} is still going on in another process") from None

    @classmethod
    def create(cls, run_root: Path) -> Journal:
        """A new journal. Raises `FileExistsError` if the folder has one."""
        path = run_root / EVENTS_FILE
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        sync_folder(run_root)
        return cls(path, [])

    @classmethod
    def reopen(cls, run_root: Path) -> Journal:
        """The journal of an earlier run, ready for more.

        Raises `RunbookError` if it is damaged, or if another process still writes it.
        """
        path = run_root / EVENTS_FILE
        journal = cls(path, [])
        try:
            journal.events, whole_bytes = read_events(path)
            os.truncate(path, whole_bytes)
        except (RunbookError, OSError):
            journal.__exit__()
            raise
        return journal

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def append(self, name: str, *, sync: bool = False, **fields: Any) -> None:
        """Write one event. Raises `OSError` if the disk refuses."""
        event = {"seq": len(self.events) + 1, "ts": utc_text(), "event": name, **fields}
        line = json.dumps(event, separators=(",", ":"), ensure_ascii=False) + "\n"
        data = line.encode()
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if sync:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)  # half an event would make the whole journal unreadable
            raise
        self.events.append(json.loads(line))


def read_events(path: Path) -> tuple[list[Event], int]:
    """The whole events of a journal, and how many bytes they take.

    A torn last line is left out. Raises `RunbookError` if an earlier line is damaged or missing,
    which no crash can do.
    """
    try:
        data = read_given(path)
    except OSError as error:
        raise RunbookError(f"{path} cannot be read: {error.strerror or error}") from error
    end = data.rfind(b"\n") + 1
    events: list[Event] = []
    for number, line in enumerate(data[:end].split(b"\n")[:-1], start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or event.get("seq") != number:
            raise RunbookError(f"{path}: line {number} is damaged or out of order")
        events.append(event)
    return events, end


@contextmanager
def _as_it_writes() -> Iterator[None]:
    """A function that reads events: one that the program never writes is told as that."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            what = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise RunbookError(
            f"{EVENTS_FILE} holds an event that this program never writes: {what}"
        ) from error


@_as_it_writes()
def phase_records(events: Sequence[Event]) -> dict[str, PhaseRecord]:
    """The latest record of every phase that was judged, in the order of their first judgement.

    One that is to be run again has none until it was, and then says how it ended before.
    """
    records: dict[str, PhaseRecord] = {}
    before: dict[str, list[Repeated]] = {}
    for event in events:
        if event["event"] == "phase_repeated":
            records.pop(event["phase"], None)
            earlier = Repeated.model_validate(event["repeated"])
            before.setdefault(event["phase"], []).append(earlier)
        elif event["event"] == "phase_finished":
            record = PhaseRecord.model_validate(event["record"])
            repeated = tuple(before.get(record.name, ()))
            records[record.name] = record.model_copy(update={"repeated": repeated})
    return records


@_as_it_writes()
def derive_record(events: Sequence[Event]) -> RunRecord:
    """The record of a run from its journal, finished or not.

    Required checks without a row become rows of phases that were not run. Raises `RunbookError`
    if the journal does not begin with the start of a run.
    """
    if not events or events[0]["event"] != "run_started":
        raise RunbookError("the journal does not begin with the start of a run")
    skeleton = RunRecord.model_validate(events[0]["record"])
    extended = [event for event in events if event["event"] == "run_extended"]
    asked = extended[-1] if extended else {}
    last = events[-1] if events[-1]["event"] in ENDS else {}
    interrupted = str(last.get("signal", ""))
    changed = skeleton.model_copy(
        update={
            "environment": _environment(skeleton, events),
            "interrupted": bool(interrupted),
            "finished_at": last.get("ts"),
            "artifacts": tuple(ArtifactRecord(**fields) for fields in last.get("artifacts", ())),
            "options": skeleton.options
            | ({"phases": asked["option"]} if asked else {})
            | ({"signal": interrupted} if interrupted else {})
            | ({"cut_off": begun} if (begun := _begun_again(events)) else {}),
            "required": tuple(asked.get("required", skeleton.required)),
            "command": "; ".join([skeleton.command, *(event["command"] for event in extended)]),
        }
    )
    return assemble(
        changed,
        list(phase_records(events).values()),
        asked_for=asked.get("phases", events[0]["phases"]),
        known={name: (title, source) for name, title, source in events[0]["known"]},
    )


def _begun_again(events: Sequence[Event]) -> str:
    """`baseline/run1 begun 3 times` for each launch that was cut off and started again.

    Who watches a run can stop a slow launch, and go on until one is fast: that must be seen.
    """
    begun: dict[tuple[str, str], int] = {}
    for event in events:
        if event["event"] == "phase_repeated":  # told by itself
            begun = {key: times for key, times in begun.items() if key[0] != event["phase"]}
        elif event["event"] == "launch_started":
            key = (event["phase"], event["launch"])
            begun[key] = begun.get(key, 0) + 1
    again = [(f"{phase}/{name}", times) for (phase, name), times in begun.items() if times > 1]
    return ", ".join(f"{name} begun {times} times" for name, times in again)


def assemble(
    record: RunRecord,
    phases: Sequence[PhaseRecord],
    *,
    asked_for: Sequence[str],
    known: Mapping[str, tuple[str, str]],
) -> RunRecord:
    """The record with these judged phases, and all that follows from them.

    Required checks that no phase gave become rows; verdict, reasons and exports are worked out.
    `record.exports` are those before any phase chose something.
    """
    signal = str(record.options.get("signal") or "")
    missing = missing_phases(
        phases,
        record.required,
        known=known,
        asked_for=asked_for,
        interrupted=signal,
        invocation=Invocation.recorded(record.profile, record.settings, record.options),
    )
    order = list(known)
    whole = sorted(
        [*phases, *missing],
        key=lambda phase: order.index(phase.name) if phase.name in known else len(order),
    )
    checks = tuple(check for phase in whole for check in phase.checks)
    exports, sources = dict(record.exports), dict(record.sources)
    for phase in whole:
        # What a person gave has the last word in a launch, and so here.
        chosen = {k: v for k, v in phase.choices.items() if k not in record.settings}
        exports |= chosen
        sources |= dict.fromkeys(chosen, f"phase {phase.name}")
    return record.model_copy(
        update={
            "phases": tuple(whole),
            "scope": scope_of(record, whole),
            "caveats": caveats_of(record, whole),
            "verdict": judge_run(checks, record.required),
            "reasons": reasons_for(checks, record.required, interrupted=signal),
            "exports": {name: value for name, value in exports.items() if value},
            "sources": sources,
        }
    )


def _environment(skeleton: RunRecord, events: Sequence[Event]) -> Mapping[str, str]:
    """What was known from the start, the facts as last collected, and the load beside phases."""
    facts = [event["environment"] for event in events if event["event"] == "facts"]
    loads = [event["environment"] for event in events if event["event"] == "load"]
    known = {**skeleton.environment, **(facts[-1] if facts else {})}
    return {**known, **{name: text for load in loads for name, text in load.items()}}


@_as_it_writes()
def recorded_settings(run_root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What a person gave for a run, by its journal, and the source of each.

    Raises `RunbookError` if the journal is damaged; empty where there is none.
    """
    path = run_root / EVENTS_FILE
    events = read_events(path)[0] if path.is_file() else []
    if not events:
        return {}, {}
    record = RunRecord.model_validate(events[0]["record"])
    return record.settings, record.given_by
