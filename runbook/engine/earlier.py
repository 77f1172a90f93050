"""How long launches and phases took before: in the newest runs of the same profile on this machine.

Only for estimates. A run that cannot be read is no ground for one; `runbook report` says what is
wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runbook.folder.names import RECORD_FILE
from runbook.folder.record import load_record
from runbook.machine.host import count_cpus
from runbook.records import Launch, RunRecord

# Of runs of one phase only, the newest may know nothing of the launch that is asked for.
_MOST_RUNS = 5


class Earlier:
    """Looks into run folders only when asked, and no further than needed."""

    def __init__(self, profile: str, out_dir: Path, *, without: str = "") -> None:
        self._kept: list[RunRecord] = []
        self._more = _newest_first(profile, out_dir, without)

    def launch(self, launch: Launch) -> tuple[float, str] | None:
        """Seconds of the same launch with as many steps, where it finished, and the run's id."""
        for record in self._records():
            for phase in record.phases:
                for entry in phase.launches:
                    then, result = entry.launch, entry.result
                    same = (then.phase, then.name) == (launch.phase, launch.name)
                    if same and then.steps == launch.steps and result.ok and result.duration_s > 0:
                        return result.duration_s, record.run_id
        return None

    def beside_launches(self, phase: str) -> float | None:
        """Seconds that a phase took besides its launches: collecting, reading, judging."""
        for record in self._records():
            for one in record.phases:
                if one.name == phase and one.duration_s > 0:
                    started = sum(entry.result.duration_s for entry in one.launches)
                    return max(0.0, one.duration_s - started)
        return None

    def _records(self) -> Iterator[RunRecord]:
        yield from self._kept
        while (record := next(self._more, None)) is not None:
            self._kept.append(record)
            yield record


def _newest_first(profile: str, out_dir: Path, without: str) -> Iterator[RunRecord]:
    from pydantic import ValidationError

    found = 0
    paths = sorted(out_dir.glob(f"*/{RECORD_FILE}"), key=lambda path: path.parent.name)
    for folder in (path.parent for path in reversed(paths)):
        if folder.name == without or found == _MOST_RUNS:
            continue
        try:
            record = load_record(folder)
        except (OSError, ValidationError):
            continue
        if record.profile == profile and _made_here(record):
            found += 1
            yield record


def _made_here(record: RunRecord) -> bool:
    """As far as a record tells: a run folder may have been copied from another machine."""
    return record.environment.get("cpu.count", str(count_cpus())) == str(count_cpus())
