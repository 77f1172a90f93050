"""Anomalies: what rank 0 says of each step, when that or gates.csv is one, and their record.

Heartbeats repeat what training.csv says, so a run whose CSV is off is not watched blindly.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from nsa.contract import GATES_CSV, HALT_FILE, HEARTBEATS, TRAINING_CSV, Event
from runbook.files import utc_text, write_atomic
from runbook.folder import ANOMALIES_JSONL, ANOMALY_TYPE
from runbook.folder.launch import LineTail, TableTail, parse_heartbeat
from runbook.launch.watch.watchdog import Thresholds

_RECENT = 50
_FEWEST = 10
_SPREAD_OF_MAD = 1.4826
_SIGNIFICANT = 4
_ALMOST_NOTHING = 0.01


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """One finding: `kind` is a fixed word, `text` one line for a person."""

    kind: str
    text: str
    step: int | None = None
    rank: int | None = None
    path: str = ""

    def line(self) -> str:
        """`kind: text`."""
        return f"{self.kind}: {self.text}"


def record_anomaly(run_dir: Path, anomaly: Anomaly, *, halt: bool) -> None:
    """Append to `anomalies.jsonl`; the first one becomes `.anomaly_type` and, if asked, `.HALT`.

    An existing `.anomaly_type` or `.HALT` is never replaced: the first reason is the reason.
    Raises `OSError` if the disk refuses.
    """
    entry = {"ts": utc_text(), **asdict(anomaly)}
    with (run_dir / ANOMALIES_JSONL).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
    if not (run_dir / ANOMALY_TYPE).exists():
        write_atomic(run_dir / ANOMALY_TYPE, anomaly.line() + "\n")
    if halt and not (run_dir / HALT_FILE).exists():
        write_atomic(run_dir / HALT_FILE, anomaly.line() + "\n")


def number(row: Mapping[str, str], name: str) -> float | None:
    """A column as a number; None if it is missing, empty or no number."""
    try:
        return float(row[name])
    except (KeyError, ValueError):
        return None


class _Detector:
    """Decides from the readings of one table, row by row; keeps the recent ones of a column."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def feed(self, row: Mapping[str, str], step: int) -> Anomaly | None:
        """The anomaly that this row completes."""
        raise NotImplementedError

    def _usual(self) -> float:
        """The median of the recent readings; 0 while there are too few."""
        return statistics.median(self._recent) if len(self._recent) >= _FEWEST else 0.0


class _Loss(_Detector):
    def feed(self, row: Mapping[str, str], step: int) -> Anomaly | None:
        loss = number(row, "loss")
        if loss is None:
            return None
        if not math.isfinite(loss):
            return Anomaly(kind="nonfinite_loss", text=f"loss {loss} at step {step}", step=step)
        middle = self._usual()
        spiked = len(self._recent) >= _FEWEST and loss > middle + self._spike(middle)
        self._recent.append(loss)
        if not spiked:
            return None
        text = f"loss {loss:.4g} at step {step}, median of the {_RECENT} steps before {middle:.4g}"
        return Anomaly(kind="loss_spike", text=text, step=step)

    def _spike(self, middle: float) -> float:
        spread = _SPREAD_OF_MAD * statistics.median(abs(x - middle) for x in self._recent)
        return max(self._limits.spike_share * abs(middle), self._limits.spike_spreads * spread)


class _GradientNorm(_Detector):
    _zeros = 0

    def feed(self, row: Mapping[str, str], step: int) -> Anomaly | None:
        norm = number(row, "grad_norm")
        if norm is None:
            return None
        self._zeros = self._zeros + 1 if norm == 0 else 0
        patience = self._limits.zero_gradient_n
        if patience and self._zeros == patience:
            text = f"gradient norm 0 in {patience} steps up to step {step}: nothing is learned"
            return Anomaly(kind="zero_gradients", text=text, step=step)
        middle = self._usual()
        if math.isfinite(norm):
            self._recent.append(norm)
        if middle > 0 and not norm <= self._limits.explosion_factor * middle:
            text = f"gradient norm {norm:.4g} at step {step}, median before {middle:.4g}"
            return Anomaly(kind="exploding_gradients", text=text, step=step)
        return None


class _Flatline(_Detector):
    """A throughput reading that stands still, or has fallen to almost nothing.

    Equal readings count only if they have four digits that could differ: a file that rounds to
    whole tokens repeats itself honestly.
    """

    _last, _equal, _low = "", 0, 0

    def feed(self, row: Mapping[str, str], step: int) -> Anomaly | None:
        rate, text = number(row, "toks_per_s"), row.get("toks_per_s", "").strip()
        patience = self._limits.flatline_n
        if rate is None or patience < 2:
            return None
        telling = len(text.strip("-0").replace(".", "")) >= _SIGNIFICANT
        self._equal = self._equal + 1 if text == self._last and telling else 1
        self._last = text
        usual = self._usual()
        is_low = rate <= _ALMOST_NOTHING * usual if usual else rate <= 0
        self._low = self._low + 1 if is_low else 0
        if not is_low:
            self._recent.append(rate)
        if self._equal == patience:
            what = f"throughput reads {text} tok/s {patience} times in a row, up to step {step}"
        elif self._low == patience:
            what = (
                f"throughput {rate:g} tok/s in {patience} steps up to step {step}, usual {usual:g}"
            )
        else:
            return None
        return Anomaly(kind="throughput_flatline", text=what, step=step)


class _Growth(_Detector):
    def __init__(self, limits: Thresholds) -> None:
        super().__init__(limits)
        self._block: list[float] = []
        self._medians: deque[float] = deque(maxlen=limits.growth_blocks + 1)
        self._rows = 0

    def feed(self, row: Mapping[str, str], step: int) -> Anomaly | None:
        used, limits = number(row, "mem_mib"), self._limits
        if used is None or not math.isfinite(used) or not limits.growth_blocks:
            return None
        self._rows += 1
        if self._rows <= limits.growth_block_rows:
            return None  # a run fills its caches first
        self._block.append(used)
        if len(self._block) < limits.growth_block_rows:
            return None
        self._medians.append(statistics.median(self._block))
        self._block.clear()
        seen = list(self._medians)
        if len(seen) <= limits.growth_blocks or any(b <= a for a, b in pairwise(seen)):
            return None
        grown = seen[-1] - seen[0]
        if grown < max(limits.growth_mib, limits.growth_share * seen[0]):
            return None
        rows = limits.growth_blocks * limits.growth_block_rows
        text = f"memory grew from {seen[0]:.0f} to {seen[-1]:.0f} MiB in {rows} rows to step {step}"
        return Anomaly(kind="memory_growth", text=text, step=step)


class _Gates(_Detector):
    """Gates that have settled on one branch, from the readings of gates.csv.

    They are the means over the layers: one layer may specialize late in a long run, and whether it
    did is for the row `gates` and a person to say. A table without means tells of the worst layer.
    """

    _bad = 0

    def feed(self, row: Mapping[str, str], step: int) -> Anomaly | None:
        limits = self._limits
        entropy, largest = number(row, "entropy_mean"), number(row, "max_gate_mean")
        if entropy is None and largest is None:
            entropy, largest = number(row, "entropy"), number(row, "max_gate")
        if entropy is None and largest is None:
            return None
        self._bad = self._bad + 1 if self._is_bad(entropy, largest) else 0
        if not limits.gate_collapse_n or self._bad != limits.gate_collapse_n:
            return None
        text = (
            f"{limits.gate_collapse_n} readings in a row up to step {step}: entropy {entropy} "
            f"(at least {limits.gate_entropy_min:g}), largest share {largest} "
            f"(at most {limits.gate_max:g})"
        )
        return Anomaly(kind="gate_collapse", text=text, step=step)

    def _is_bad(self, entropy: float | None, largest: float | None) -> bool:
        low = entropy is not None and not entropy >= self._limits.gate_entropy_min
        return low or (largest is not None and not largest <= self._limits.gate_max)


class Detectors:
    """Everything that is decided from the rows of the steps and of the gates.

    A row that lacks the columns of a detector tells it nothing.
    """

    def __init__(self, limits: Thresholds) -> None:
        kinds = (_Loss, _GradientNorm, _Flatline, _Growth, _Gates)
        self._all: list[_Detector] = [kind(limits) for kind in kinds]

    def feed(self, row: Mapping[str, str]) -> Iterator[Anomaly]:
        """The anomalies that this row completes; none if it has no step."""
        step = number(row, "step")
        if step is not None and math.isfinite(step):
            yield from filter(None, (one.feed(row, int(step)) for one in self._all))


class Monitor:
    """Reads what was added since the last look: the readings of the steps, and gates.csv."""

    def __init__(self, run_dir: Path, limits: Thresholds) -> None:
        self.run_dir, self.limits = run_dir, limits
        self.readings = Readings(run_dir)
        self._gates, self._detectors = TableTail(run_dir / GATES_CSV), Detectors(limits)

    def look(self) -> list[Anomaly]:
        """What the new rows show, in their order."""
        return [
            replace(anomaly, path=table.path.name if table.path else "")
            for table in (self.readings, self._gates)
            for row in table.rows()
            for anomaly in self._detectors.feed(row)
        ]

    def look_and_record(self) -> list[Anomaly]:
        """Look, write down what was found, and halt the run if that is wanted."""
        found = self.look()
        for anomaly in found:
            record_anomaly(self.run_dir, anomaly, halt=self.limits.halt)
        return found


_SAID = ("step", "loss", "grad_norm", "toks_per_s")
_MEMORY = "mem_mib"


class Readings:
    """New rows of training.csv; while there is none, rank 0's `progress` heartbeats as such rows.

    `path` is the file that the last row came from, None before the first.
    """

    def __init__(self, run_dir: Path) -> None:
        self._table = TableTail(run_dir / TRAINING_CSV)
        self._beats = LineTail(run_dir / HEARTBEATS.name(0))
        self._memory: str | None = None
        self._told = 0.0
        self.path: Path | None = None
        self.rows_read = 0

    def rows(self) -> Iterator[dict[str, str]]:
        """The rows that have been completed since the last call, each step once."""
        source = self._table if self._table.path.exists() else self._beats
        rows = self._table.rows() if source is self._table else self._progress()
        for row in rows:
            # A CSV that comes late begins with steps that the heartbeats have told.
            if source is self._table and self._told and not step_of(row) > self._told:
                continue
            if source is self._beats:
                self._told = max(self._told, step_of(row))
            self.path = source.path
            self.rows_read += 1
            yield row

    def _progress(self) -> Iterator[dict[str, str]]:
        for line in self._beats.lines():
            beat = parse_heartbeat(line) or {}
            event = beat.get("event", beat.get("msg"))
            if event == Event.STEP_END and beat.get(_MEMORY) is not None:
                self._memory = str(beat[_MEMORY])
            if event == Event.PROGRESS:
                row = {name: str(beat[name]) for name in _SAID if beat.get(name) is not None}
                yield row if self._memory is None else row | {_MEMORY: self._memory}


def step_of(row: dict[str, str]) -> float:
    """The row's step; 0 where it has none, which no detector takes either."""
    return number(row, "step") or 0.0
