"""Three records: one GO, one NO-GO, one cut off. They lie beside the reports that they make."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from runbook.engine.derive import write_reports
from runbook.records import (
    Check,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Measurement,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Series,
    Verdict,
)
from tests.factory.records import launch, phase

GOLDEN = Path(__file__).parent / "golden"


@cache
def _read(name: str) -> RunRecord:
    text = (GOLDEN / name / "run.json").read_text(encoding="utf-8")
    return RunRecord.model_validate_json(text)


def go() -> RunRecord:
    """Every required check passes; one optional one is skipped."""
    return _read("go")


def no_go() -> RunRecord:
    """Throughput is under the floor, and the sweep is undecided."""
    return _read("no_go")


def incomplete() -> RunRecord:
    """Stopped by hand while the baseline hung; the sweep and the long run left no row at all."""
    return _read("incomplete")


SAMPLES = {"go": go, "no_go": no_go, "incomplete": incomplete}


def run(verdict: Verdict, phases: tuple[PhaseRecord, ...], **fields: object) -> RunRecord:
    """The GO with other phases."""
    kept = {name: getattr(go(), name) for name in RunRecord.model_fields}
    return RunRecord.model_validate({**kept, "verdict": verdict, "phases": phases, **fields})


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def measured(value: float | bool | str, unit: str, path: str, **more: object) -> Measurement:
    fields: dict[str, object] = {"name": path.rpartition("/")[2], "n": 1, "window": None} | more
    return Measurement.model_validate(
        {"value": value, "unit": unit, "path": path, "sha256": digest(path), **fields}
    )


def throughput(value: float, outcome: Outcome, code: Reason, reason: str) -> Check:
    """The row that is held against the floor, with another number."""
    (known,) = (go() if outcome is Outcome.PASS else no_go()).phases[1].checks
    spread = {"stdev": value / 40, "interval": (value * 0.97, value * 1.03)}
    number = known.measurement.model_copy(update={"value": value, **spread})
    said = {"outcome": outcome, "code": code, "reason": reason, "measurement": number}
    return known.model_copy(update=said)


def series(ys: Sequence[float], *, name: str = "run", **told: object) -> Series:
    points = tuple((float(step), y) for step, y in enumerate(ys, start=1))
    usual = {"name": name, "label": name, "unit": "tok/s", "points": points, "n": len(ys)}
    usual |= {"path": "phase/run/training.csv", "sha256": digest("p")}
    return Series.model_validate({**usual, **told})


def pictured(*, curves: Sequence[Series] = (), **told: object) -> RunRecord:
    """A run of one phase `sweep` with these pictures."""
    made = phase("sweep", **{"outcome": Outcome.PASS, "series": curves, **told})
    return run(Verdict.GO, (made,))


def baseline(check: Check, **result: object) -> PhaseRecord:
    entries = (entry("baseline", "launch_0", **result),)
    return go().phases[1].model_copy(update={"checks": (check,), "launches": entries})


def long_run() -> PhaseRecord:
    return go().phases[3]


def entry(of: str, name: str, **result: object) -> LaunchEntry:
    words = "torchrun --nproc_per_node=2 -m nsa.train --ddp 1 --steps 100"
    started = launch(
        *words.split(),
        name=name,
        phase=of,
        config="configs/m7c_125m_2xa100_production.yaml",
        env={"NSA_PREFILL_BATCHED": "1", "NCCL_ALGO": "Ring"},
        steps=100,
        timeout_s=900,
    )
    fields: dict[str, object] = {"status": LaunchStatus.COMPLETED, "exit_code": 0}
    fields |= {"duration_s": 61.5} | result
    return LaunchEntry(launch=started, result=LaunchResult.model_validate(fields))


# Write the golden reports anew: `python -m tests.reports.samples`, then read the difference.


def main() -> None:
    for name, make in SAMPLES.items():
        write_reports(make(), GOLDEN / name)


if __name__ == "__main__":
    main()
