"""What lies on the disk, of a run and of each launch: its only readers, and the run's writers.

A format is read here and nowhere else, whoever needs it. Readers never raise for what a file
holds; nothing here judges, signals or waits. Each name is spelled here alone; those of the
trainer's own files are in `nsa.contract`.

events.jsonl is the journal of a run, one line for each event, and who holds it: its lock is held
until the run ends, which tells a run that goes on; a look at one costs no time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runbook.errors import RunbookError
from runbook.files import read_given, utc_text

RECORD_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
# What a run ends with for now; both list every file with its digest.
ENDS = ("run_finished", "run_interrupted")
MANIFEST_FILE = "MANIFEST.sha256"
ACCEPTED_JSON = "accepted.json"
# What the harness writes into a launch's folder; the trainer's files are in nsa.contract.
LAUNCH_JSON = "launch.json"
RESULT_JSON = "result.json"
CONSOLE_LOG = "console.log"
# Where a run keeps the trainer configs that its launches read; no phase can have this name.
CONFIGS_FOLDER = "trainer-configs"
JUNIT_XML = "junit.xml"
GPU_SAMPLES_CSV = "gpu_samples.csv"
GPU_SAMPLER_TXT = "gpu_sampler.txt"
DEVICES_BEFORE_JSON = "devices_before.json"
DEVICES_AFTER_JSON = "devices_after.json"
NVIDIA_SMI_BEFORE_XML = "nvidia_smi_before.xml"
NVIDIA_SMI_AFTER_XML = "nvidia_smi_after.xml"
CHECKOUT_JSON = "checkout.json"
KERNEL_LOG_JSON = "kernel_log.json"
LOAD_JSON = "load.json"
# What the ranks of a watched launch held besides memory.
RESOURCES_CSV = "resources.csv"
# Of a trainer of one's own: where it writes, when its rows came, and its processes meanwhile.
OWN_FOLDER = "own"
ARRIVALS_CSV = "arrivals.csv"
PROCESSES_CSV = "processes.csv"
INCIDENT_JSON = "incident.json"
ANOMALIES_JSONL = "anomalies.jsonl"
ANOMALY_TYPE = ".anomaly_type"

Event = Mapping[str, Any]
RUNNING = "RUNNING"


def config_copy(run_root: Path, name: str) -> Path:
    """Where a run keeps its copy of a trainer config.

    Two configs of one name in different folders have two copies.
    """
    path = Path(name)
    folder = hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]
    return run_root / CONFIGS_FOLDER / folder / path.name


def kept_config(run_root: Path, name: str) -> Path | None:
    """The run's own copy of the config of this name; None if it has none."""
    copy = config_copy(run_root, name)
    return copy.resolve() if name and copy.is_file() else None


def run_folders(out: Path) -> list[Path]:
    """The folders of `out` that hold a run or what is left of one, oldest first.

    By name, since an id begins with its UTC time; empty where there is no such folder. A run is its
    owner's: those of other users, in a folder that they share, cannot be looked into.
    """
    left = (RECORD_FILE, EVENTS_FILE, MANIFEST_FILE)
    there = sorted(out.iterdir()) if out.is_dir() else []
    ours = (folder for folder in there if os.access(folder, os.X_OK))
    return [folder for folder in ours if any((folder / name).is_file() for name in left)]


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
        from nsa.contract.writing import sync_folder

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
    ends otherwise or has a key twice, which no crash can do.
    """
    try:
        data = read_given(path)
    except OSError as error:
        raise RunbookError(f"{path} cannot be read: {error.strerror or error}") from error
    end = data.rfind(b"\n") + 1
    events: list[Event] = []
    for number, line in enumerate(data[:end].split(b"\n")[:-1], start=1):
        try:
            event = None if line.endswith(b"\r") else json.loads(line, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or event.get("seq") != number:
            raise RunbookError(f"{path}: line {number} is damaged or out of order")
        events.append(event)
    return events, end


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises `ValueError` if one would replace another."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


@contextmanager
def as_it_writes() -> Iterator[None]:
    """A function that reads events: one that the program never writes is told as that."""
    from pydantic import ValidationError

    try:
        yield
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, ValidationError):
            from runbook.records.measurement import first_problem

            what = first_problem(error)
        raise RunbookError(
            f"{EVENTS_FILE} holds an event that this program never writes: {what}"
        ) from error


def is_going_on(folder: Path) -> bool:
    """True if a process holds the journal of the run in this folder; False without a journal."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        return False
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Shared: two that look at once are no run that goes on.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def events_so_far(path: Path) -> list[Event]:
    """The journal's events; empty if it is missing or damaged before its last line."""
    try:
        return read_events(path)[0]
    except RunbookError:
        return []


def phases_done(events: Sequence[Event]) -> str:
    """`2 of 5 phases`."""
    planned = [event["phases"] for event in events if isinstance(event.get("phases"), list)]
    names = [one.get("event") for one in events if not one.get("interrupted")]
    done = names.count("phase_finished") - names.count("phase_repeated")
    count = len(planned[-1]) if planned else 0
    return f"{done} of {count} phase{'' if count == 1 else 's'}"


def running_text(folder: Path) -> str:
    """`RUNNING, 2 of 5 phases, now smoke/run` of a run that goes on; empty for any other."""
    try:
        if not is_going_on(folder):
            return ""
    except PermissionError:
        return ""  # the run of somebody else, of which only what it wrote can be read
    events = events_so_far(folder / EVENTS_FILE)
    last = next((one for one in reversed(events) if "phase" in one), {})
    words = [str(last[name]) for name in ("phase", "launch") if name in last]
    now = f", now {'/'.join(words)}" if words else ""
    return f"{RUNNING}, {phases_done(events)}{now}"


def watch_line(folder: Path) -> str:
    """The command that looks on: by the link `latest` where it leads into this run."""
    from nsa.contract import LATEST_LINK

    link = folder.parent / LATEST_LINK
    here = folder.resolve()
    place = link if link.is_symlink() and here in link.resolve().parents else folder
    return f"runbook watch {shlex.quote(str(place))}"
