"""What `runbook watch` follows and shows: the launch that wrote last, and those after it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from nsa.contract import ENV_JSON, HEARTBEATS, TRAINING_CSV, Event, ExitCode
from runbook.errors import UsageError
from runbook.folder import ANOMALIES_JSONL, EVENTS_FILE, OWN_FOLDER, is_going_on, run_folders
from runbook.folder.launch import heartbeats_in
from runbook.folder.launch.documents import json_object
from runbook.folder.launch.shapes import is_any_number
from runbook.launch.watch import RankState
from runbook.launch.watch.detectors import Anomaly
from runbook.launch.watch.live_status import pulse_of
from runbook.launch.watch.watchdog import Thresholds
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text
from runbook.tools.watch import Watcher, is_over

_LOOK_EVERY_S = 1.0


def watched(
    folder: Path, *, interval_s: float, within_s: float, tell: Callable[[str], None]
) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """The launches below a folder or behind a link, and what says that one of them was left.

    It is always the one that wrote last. A run that goes on there has a next one to wait for; else
    it ends with the launch. Where there is none yet, or a folder of runs has none that goes on, it
    waits `within_s` at most. Raises UsageError if no run has begun by then.
    """
    place, seen = newest(folder), set[Path]()
    if place and is_over(place) and folder.resolve() in (run_of(place) or place).parents:
        seen.add(place)
    if place is None or seen:
        why = f"{place} is over" if place else "nothing has written there yet"
        tell(f"waiting for a run to begin in {folder}, {within_s:g} s at most: {why}")
    deadline, begun = monotonic() + within_s, False
    while True:
        on, place = _goes_on(folder), newest(folder)
        if place and place not in seen:
            seen.add(place)
            yield place, partial(_has_left, folder, seen, on)
            begun = True
        elif begun and not on:
            return
        elif not on and monotonic() > deadline:
            raise UsageError(
                f"no run has begun in {folder} within {within_s:g} s",
                hint="start the run, then watch its own directory",
            )
        else:
            sleep(min(interval_s, _LOOK_EVERY_S))


def newest(folder: Path) -> Path | None:
    """The directory that wrote rows or heartbeats last: the folder's own, or one below it.

    A trainer of one's own writes into a folder of its launch.
    """
    found = []
    for path in _below(folder, 3, TRAINING_CSV, HEARTBEATS.glob(), OWN_FOLDER):
        with suppress(FileNotFoundError):  # its launch is kept aside meanwhile
            found.append((path.stat().st_mtime, path.parent))
    return max(found)[1].resolve() if found else None


def folders_of_ranks(folder: Path) -> list[Path]:
    """Directories with heartbeats: the one that is named, or all of a run's launches."""
    beats = _below(folder, 2, HEARTBEATS.glob())
    return sorted({path.parent.resolve() for path in beats})  # once, with a link `latest` too


def _below(folder: Path, depth: int, *names: str) -> Iterator[Path]:
    """What has one of these names in the folder, or below it in so many; asked at each look."""
    for place, folders, files in os.walk(root := folder.resolve(), followlinks=True):
        found = (one for one in (*folders, *files) if any(fnmatch(one, name) for name in names))
        yield from (Path(place, one) for one in found)
        if len(Path(place).parts) - len(root.parts) == depth:
            folders.clear()


def _goes_on(folder: Path) -> bool:
    """Does a run go on whose next launch would be found there?"""
    run = run_of(folder.resolve())
    out = run.parent if run and folder.is_symlink() else folder
    return any(is_going_on(one) for one in (folder, *run_folders(out)))


def _has_left(folder: Path, seen: set[Path], went_on: bool) -> bool:
    """Has a launch written that was not looked at, or has the run ended that went on?"""
    return newest(folder) not in seen or (went_on and not _goes_on(folder))


def run_of(place: Path) -> Path | None:
    """The folder of the run to which a launch's folder belongs."""
    return next((one for one in place.parents if (one / EVENTS_FILE).is_file()), None)


def launch_name(place: Path) -> str:
    """`production/leg1 of 20261125T030838Z-def662f`; of a launch by hand its path."""
    run = run_of(place)
    return f"{place.relative_to(run).as_posix()} of {run.name}" if run else str(place)


class Screen(Watcher):
    """A watcher whose `lines` say what is known, and what cannot be seen."""

    def __init__(self, run_dir: Path, limits: Thresholds) -> None:
        super().__init__(run_dir, limits)
        self._found: list[Anomaly] = []
        self._plan: Mapping[str, Any] = {}

    def look(self) -> list[Anomaly]:
        """What is new; the screen counts it from now on."""
        found = super().look()
        self._found += found
        return found

    def lines(self) -> list[str]:
        """The whole screen, from the run's state down to each rank."""
        states = [state for _, state in sorted(self.ranks.ranks.items())]
        first = states[0] if states else None
        return [
            f"{self.run_dir}  {self._state(states)}",
            *([self._numbers(first)] if first is not None else []),
            *(_rank_line(state) for state in states),
            self._checkpoint(first),
            self._incidents(),
            *(f"not seen: {line}" for line in self._unseen(states)),
        ]

    def status(self) -> str:
        """One line of it, for a log."""
        states = [state for _, state in sorted(self.ranks.ranks.items())]
        numbers = [self._numbers(states[0])] if states else []
        return "  ".join([self._state(states), *numbers, self._incidents()])

    def _state(self, states: Sequence[RankState]) -> str:
        if not states:
            return "no heartbeats"
        step, total = min(state.step for state in states), self._number("steps")
        done = f"step {step}" + (f"/{total:.0f}, {100 * step / total:.0f} %" if total else "")
        ends = [state for state in states if state.exit_code is not None]
        bad = [state for state in ends if state.exit_code != ExitCode.SUCCESS]
        dead = [state for state in states if state.ended and state.exit_code is None]
        if dead:
            ranks = ", ".join(str(state.rank) for state in dead)
            return f"rank {ranks} is gone without a word at {done}"
        if len(ends) == len(states):
            end = (bad or ends)[0]
            return f"ended at {done}: {end.exit_reason or 'no reason'} (code {end.exit_code})"
        return f"{done}{self._left(states[0], step, total)}"

    def _left(self, state: RankState, step: int, total: float | None) -> str:
        tokens = self._number("tokens_per_step")
        if not total or not tokens or not state.rates or self._silent(state):
            return ""
        seconds = (total - step) * tokens / statistics.median(state.rates)
        return f", {duration_text(round(seconds))} left" if seconds > 0 else ""

    def _numbers(self, state: RankState) -> str:
        told = state.latest.get(Event.PROGRESS, {})
        evaluated = state.latest.get(Event.EVAL)
        parts = [f"loss {told['loss']:.4f}" if is_any_number(told.get("loss")) else ""]
        if isinstance(told.get("loss"), str):
            parts = [f"loss {told['loss']}"]
        if evaluated is not None and is_any_number(evaluated.get("loss")):
            parts.append(f"validation {evaluated['loss']:.4f} (step {evaluated.get('step')})")
        if is_any_number(told.get("grad_norm")):
            parts.append(f"gradient norm {told['grad_norm']:.3g}")
        # The last rate of a run that has fallen silent is not its rate.
        if state.rates and not state.ended and not self._silent(state):
            parts.append(f"{statistics.median(state.rates):,.0f} {TOKENS_PER_SECOND}")
        shown = [part for part in parts if part]
        return "  ".join(shown) if shown else "no step has been told yet"

    def _silent(self, state: RankState) -> bool:
        ranks = list(self.ranks.ranks.values())
        pulse = pulse_of(ranks, wanted=len(ranks), now=time.monotonic())
        return any(one.rank == state.rank for one in pulse.silent)

    def _checkpoint(self, state: RankState | None) -> str:
        record = state.latest.get(Event.CHECKPOINT) if state is not None else None
        if record is None:
            every = self._plan.get("config", {}).get("train", {}).get("save_every")
            return "checkpoint  none yet" + (f", one every {every} steps" if every else "")
        took = [f"{_seconds(record.get('seconds'))} to write"]
        if is_any_number(record.get("held_up_s")):
            took.append(f"training held up {_seconds(record['held_up_s'])}")
        name = Path(str(record.get("path"))).name
        return f"checkpoint  {name}, {_age(record.get('ts'))} old ({', '.join(took)})"

    def _incidents(self) -> str:
        file = self.run_dir / ANOMALIES_JSONL
        rows = heartbeats_in(file) if file.is_file() else ()
        earlier = [f"{row.get('kind')}: {row.get('text')}" for row in rows]
        texts = list(dict.fromkeys([*earlier, *(one.line() for one in self._found)]))
        return f"incidents  {len(texts)}" + (f", last: {texts[-1]}" if texts else "")

    def _unseen(self, states: Sequence[RankState]) -> Iterator[str]:
        if not self._plan:
            yield f"how long the run is (no {ENV_JSON} yet)"
        if any(_memory(state)[1] for state in states):
            yield "use of the GPUs (nvidia-smi shows it)"

    def _number(self, name: str) -> float | None:
        if not self._plan:
            self._plan = json_object(self.run_dir / ENV_JSON)
        value = self._plan.get("effective", {}).get(name)
        return float(value) if is_any_number(value) else None


def _rank_line(state: RankState) -> str:
    if state.exit_code is not None:
        now = f"ended with code {state.exit_code}"
    elif state.ended:
        now = "gone"
    else:
        now = f"{state.phase}, heard {_age(state.ts)} ago"
    host, device = _memory(state)
    memory = "  ".join(
        f"{what} {value:,.0f} MiB" for what, value in (("host", host), ("GPU", device)) if value
    )
    return f"rank {state.rank}  step {state.step}  {now}  {memory}".rstrip()


def _memory(state: RankState) -> tuple[float, float]:
    """MiB on the host and, at its peak, on the device; 0 where nothing is told."""
    told = state.recent[-1] if state.recent else {}
    step = state.latest.get(Event.STEP_END, {})
    host, device, peak = told.get("rss_mib"), told.get("cuda_mib"), step.get("reserved_mib")
    if is_any_number(device) and is_any_number(peak):
        device = peak
    return _or_zero(host), _or_zero(device)


def _or_zero(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _age(ts: object) -> str:
    """How long ago by the wall clock that the run wrote."""
    if not isinstance(ts, int | float):
        return "?"
    seconds = max(0.0, time.time() - ts)
    return duration_text(round(seconds, 1) if seconds < 10 else round(seconds))


def _seconds(value: object) -> str:
    return duration_text(float(value)) if isinstance(value, int | float) else "? s"
