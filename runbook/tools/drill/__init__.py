"""Fire drills: the faults that can be injected on one machine, and what counts as noticing each.

They are in `configs/drill/faults.yaml`: a new one is one entry there. `nsa.inject`, which runs
inside the ranks and is started by name, does them. Each is judged: was it noticed as promised?
"""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

from nsa.contract import TRAINING_CSV, Event
from runbook.errors import UsageError, did_you_mean
from runbook.files import make_new_dir, make_private_dir, shipped_data
from runbook.folder.launch import heartbeat_files, heartbeats_in
from runbook.folder.launch.evidence import read_training_csv
from runbook.launch.incident.flight import SHORT_OF_CPUS
from runbook.launch.observer import StopRequest
from runbook.process import carriers
from runbook.records import LaunchStatus

if TYPE_CHECKING:
    from runbook.tools.drill.scene import Scene

BUDGET_S = 3.0
# After a budget is over: evidence, end, verdict. A crash has no budget, only this (and 2 s).
MARGIN_S = 2.0


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what is injected where, and what the harness must say.

    The fields are those of the file, explained there. `threshold_s` is the budget of the phase it
    is injected in, 0 where the kernel tells at once. `culprit` None means that no rank may be
    blamed.
    """

    name: str
    title: str
    inject: str = "none"
    rank: int = 1
    step: int = 6
    steps: int = 2000
    status: LaunchStatus = LaunchStatus.CRASHED
    or_status: LaunchStatus | None = None
    culprit: int | None = 1
    cause: str = ""
    threshold_s: float = 0.0
    late_s: float = 0.0
    evidence: tuple[str, ...] = ()
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    budgets: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    scene: str = "launch"
    note: str = ""

    @property
    def limit_s(self) -> float:
        """Seconds from injection to the verdict, everything dead, that are good enough."""
        return self.threshold_s + MARGIN_S + self.late_s


def _faults() -> dict[str, Fault]:
    document = shipped_data("drill/faults")
    kinds = document["kinds"]
    whole = {
        name: {"name": name, **kinds[one["like"]], **{k: v for k, v in one.items() if k != "like"}}
        for name, one in document["faults"].items()
    }
    adapter = TypeAdapter(dict[str, Fault], config=ConfigDict(extra="forbid"))
    return adapter.validate_python(whole)


FAULTS = _faults()


def select(text: str) -> list[Fault]:
    """The faults that a comma-separated list names; `all` is every one.

    Raises `UsageError` that lists every unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = ("all", *FAULTS)
    wrong = [f"unknown fault {n!r}{did_you_mean(n, FAULTS)}" for n in names if n not in known]
    if wrong or not names:
        raise UsageError(wrong or "--faults names none", hint=f"known are: {', '.join(known)}")
    return [FAULTS[name] for name in (FAULTS if "all" in names else dict.fromkeys(names))]


_ORPHANS_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class DrillRow:
    """One injected fault and how the harness did. `problems` is empty if it did as promised."""

    fault: str
    title: str
    detected: bool
    culprit_right: bool
    seconds: float | None
    threshold_s: float
    limit_s: float | None
    evidence: tuple[str, ...]
    orphans: int
    rows_lost: int
    cause: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Did everything go as promised?"""
        return not self.problems

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


def judge_scene(fault: Fault, scene: Scene) -> DrillRow:
    """Compare what was seen with what the fault promises."""
    orphans = _orphans(scene)
    result = scene.result
    cause_right = re.search(fault.cause, result.cause) is not None if fault.cause else True
    noted = not fault.note or any(fault.note in note for note in result.notes)
    ended_so = result.status in (fault.status, fault.or_status)
    detected = ended_so and cause_right and noted
    culprit_right = result.culprit_rank == fault.culprit
    # What the machine did to the launch accuses no rank: a drill may run beside other work.
    alarms = [note for note in result.notes if not note.startswith(SHORT_OF_CPUS)]
    control = fault.status is LaunchStatus.COMPLETED
    seconds = None if control or scene.injected_at is None else scene.ended_at - scene.injected_at
    late = seconds is not None and seconds > fault.limit_s
    lost, damage = _rows_lost(scene)
    files = sorted({path.rsplit("/", 1)[-1] for path in result.evidence})
    missing = [part for part in fault.evidence if not any(part in name for name in files)]
    found = {
        f"ended as {result.status.value}, wanted {fault.status.value}": not ended_so,
        f"the cause does not say {fault.cause!r}": not cause_right,
        f"no note says {fault.note!r}: {list(result.notes)}": not noted,
        f"false alarm: {alarms}": control and not fault.note and bool(alarms),
        f"blamed rank {result.culprit_rank}, wanted {fault.culprit}": not culprit_right,
        "the fault was never injected": not control and scene.injected_at is None,
        f"took {seconds or 0.0:.1f} s, allowed {fault.limit_s:g} s": late,
        f"{orphans} processes were left alive": orphans > 0,
        f"{lost} rows are lost": lost > 0,
        **{f"no evidence {part}": True for part in missing},
    }
    problems = [*damage, *scene.remarks, *(text for text, wrong in found.items() if wrong)]
    return DrillRow(
        fault=fault.name,
        title=fault.title,
        detected=detected,
        culprit_right=culprit_right,
        seconds=None if seconds is None else round(seconds, 3),
        threshold_s=fault.threshold_s,
        limit_s=None if control else fault.limit_s,
        evidence=tuple(files),
        orphans=orphans,
        rows_lost=lost,
        cause=result.cause,
        problems=tuple(problems),
    )


def _orphans(scene: Scene) -> int:
    """Processes with the launch's token that are alive a second after the verdict."""
    token = scene.result.run_token
    deadline = scene.ended_at + _ORPHANS_AFTER_S
    while token and carriers(token) and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(carriers(token)) if token else 0


def _rows_lost(scene: Scene) -> tuple[int, list[str]]:
    """Steps that rank 0 said were written and that cannot be read back; and damaged files."""
    path = scene.run_dir / TRAINING_CSV
    said = _said_written(scene)
    if not path.is_file():
        return len(said), []
    log = read_training_csv(path, relative_to=scene.root)
    rows = set(log.frame["step"].tolist()) if "step" in log.frame else set()
    damage = [f"training.csv is damaged: {', '.join(log.problems)}"] if log.damaged else []
    return len(said - rows), damage


def _said_written(scene: Scene) -> set[int]:
    path = heartbeat_files(scene.run_dir).get(0) if scene.run_dir.is_dir() else None
    if path is None:
        return set()
    said = (beat["step"] for beat in heartbeats_in(path) if beat.get("event") == Event.PROGRESS)
    return set(map(int, said))


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """All rows of a drill."""

    rows: tuple[DrillRow, ...]
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Every injected fault was noticed as promised, and none was left out."""
        return bool(self.rows) and not self.interrupted and all(row.ok for row in self.rows)

    def summary(self) -> dict[str, Any]:
        """The figures: how many, how often right, how much later than the threshold."""
        timed = [row for row in self.rows if row.seconds is not None]
        over = sorted((row.seconds or 0.0) - row.threshold_s for row in timed)
        culprits = [row for row in self.rows if row.limit_s is not None]
        return {
            "faults": len(self.rows),
            "kinds": len({row.fault for row in self.rows}),
            "good": sum(row.ok for row in self.rows),
            "detected": sum(row.detected for row in self.rows),
            "culprit_right": sum(row.culprit_right for row in culprits),
            "culprit_of": len(culprits),
            "median_over_threshold_s": round(statistics.median(over), 3) if over else None,
            "max_over_threshold_s": round(over[-1], 3) if over else None,
            "orphans": sum(row.orphans for row in self.rows),
            "rows_lost": sum(row.rows_lost for row in self.rows),
        }


def run_drill(
    faults: Sequence[Fault],
    out: Path,
    *,
    stop: StopRequest,
    on_row: Callable[[DrillRow], None],
) -> DrillReport:
    """Inject every fault in a folder below `out` (which must not exist).

    Folders of injections that went as promised are deleted. Raises `UsageError` if `out` cannot
    be made, and `OSError` if the disk refuses later.
    """
    from runbook.tools.drill.scene import SCENES  # which has the faults from here

    make_new_dir("--out", out)
    rows: list[DrillRow] = []
    for index, fault in enumerate(faults, start=1):
        root = out / f"{index:03d}-{fault.name}"
        make_private_dir(root)
        scene = SCENES[fault.scene](fault, root, stop)
        if stop.requested:
            break
        rows.append(judge_scene(fault, scene))
        if rows[-1].ok:
            shutil.rmtree(root)
        on_row(rows[-1])
    return DrillReport(rows=tuple(rows), interrupted=len(rows) < len(faults))
