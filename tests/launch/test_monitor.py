"""Following files that grow, tear and restart, and telling the run directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.launch.watch.detectors import Detectors, Monitor
from runbook.launch.watch.watchdog import Thresholds
from tests.factory import files

HEADER = files.HEADER + "\n"


def row(step: int, loss: object = 5.5, rate: float | None = None) -> str:
    shown = 1000 + 7.3 * (step % 11) if rate is None else rate
    return files.row(step, loss=loss, toks_per_s=f"{shown:.3f}") + "\n"


def test_monitor_halts_with_the_first_reason(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    path.write_text(HEADER + "".join(row(step) for step in range(1, 20)))
    monitor = Monitor(tmp_path, Thresholds())
    assert monitor.look_and_record() == []
    assert not (tmp_path / ".HALT").exists()
    with path.open("a") as stream:
        stream.write(row(20, loss=55.0) + row(21, loss="nan"))
    assert [a.kind for a in monitor.look_and_record()] == ["loss_spike", "nonfinite_loss"]
    assert (tmp_path / ".HALT").read_text().startswith("loss_spike: loss 55 at step 20")
    assert (tmp_path / ".anomaly_type").read_text() == (tmp_path / ".HALT").read_text()
    lines = [json.loads(t) for t in (tmp_path / "anomalies.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["step"], e["path"]) for e in lines] == [
        ("loss_spike", 20, "training.csv"),
        ("nonfinite_loss", 21, "training.csv"),
    ]
    assert monitor.look() == []


def beats(*rows: dict[str, object]) -> str:
    """Rank 0's heartbeats of these steps, as the trainer writes them."""
    lines = []
    for said in rows:
        step, memory = said["step"], said.pop("mem_mib", 300.0)
        lines.append({"event": "step_start", "step": step})
        lines.append({"event": "step_end", "step": step, "mem_mib": memory})
        lines.append({"event": "progress", "loss": 5.5, "grad_norm": 1.0, **said})
    return "".join(json.dumps(line) + "\n" for line in lines)


def usual(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "toks_per_s": 1000 + 7.3 * (step % 11), **more}


SICK = {
    "nonfinite_loss": [usual(20, loss="nan")],
    "loss_spike": [usual(20, loss=55.0)],
    "zero_gradients": [usual(step, grad_norm=0.0) for step in (20, 21, 22)],
    "exploding_gradients": [usual(20, grad_norm="inf")],
    "throughput_flatline": [usual(step, toks_per_s=1234.567) for step in range(20, 24)],
    "memory_growth": [usual(step, mem_mib=100.0 * step) for step in range(20, 71)],
}


@pytest.mark.parametrize("kind", SICK)
def test_without_a_csv_the_heartbeats_are_watched(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "heartbeat_rank0.jsonl"
    path.write_text(beats(*(usual(step) for step in range(1, 20))))
    monitor = Monitor(tmp_path, Thresholds())
    assert monitor.look() == []
    with path.open("a") as stream:
        stream.write(beats(*SICK[kind]))
    (anomaly,) = monitor.look_and_record()
    assert (anomaly.kind, anomaly.path) == (kind, path.name)
    assert (tmp_path / ".HALT").read_text().startswith(kind)
    assert monitor.look() == []


def test_a_csv_that_comes_late_goes_on_where_the_heartbeats_were(tmp_path: Path) -> None:
    """No step twice: equal readings of one step would be a flat line, equal memory a plateau."""
    heartbeats = tmp_path / "heartbeat_rank0.jsonl"
    heartbeats.write_text(beats(*(usual(step) for step in range(1, 20))))
    monitor = Monitor(tmp_path, Thresholds())
    monitor.look()
    (tmp_path / "training.csv").write_text(HEADER + "".join(row(step) for step in range(1, 25)))
    with heartbeats.open("a") as stream:
        stream.write(beats(usual(20, loss="nan")))  # the CSV is the source as soon as it is there
    assert monitor.look() == []
    assert monitor.readings.rows_read == 24
    assert monitor.readings.path == tmp_path / "training.csv"


HEALTHY = {"loss": "5.5", "grad_norm": "1.0", "mem_mib": "300.0"}


def rows(count: int, start: int = 1, **columns: object) -> list[dict[str, str]]:
    """Healthy rows with a throughput that varies; `columns` may be values or functions of step."""
    made = []
    for step in range(start, start + count):
        row = {"step": str(step), "toks_per_s": f"{1000 + 7.3 * (step % 11):.3f}", **HEALTHY}
        for name, value in columns.items():
            row[name] = str(value(step) if callable(value) else value)
        made.append(row)
    return made


def kinds(readings: Iterable[Mapping[str, str]], limits: Thresholds | None = None) -> list[str]:
    detectors = Detectors(limits or Thresholds())
    return [anomaly.kind for row in readings for anomaly in detectors.feed(row)]


def test_a_spike_is_told_from_noise() -> None:
    calm = rows(40, loss=lambda step: 5.5 + 0.03 * (step % 5))
    assert kinds([*calm, *rows(1, 41, loss=8.2)]) == []  # half as much again is 8.34
    assert kinds([*calm, *rows(1, 41, loss=8.6)]) == ["loss_spike"]
    wild = rows(40, loss=lambda step: 5.5 + 2.0 * (step % 3))
    assert kinds([*wild, *rows(1, 41, loss=15.0)]) == []  # ten spreads is far more
    assert kinds(rows(9, loss=lambda step: 9.0 if step == 9 else 1.0)) == []  # too few to know


def test_gradients_that_vanish_or_explode() -> None:
    assert kinds([*rows(20), *rows(2, 21, grad_norm=0.0)]) == []
    assert kinds([*rows(20), *rows(5, 21, grad_norm=0.0)]) == ["zero_gradients"]
    assert kinds([*rows(20), *rows(1, 21, grad_norm=99.0)]) == []
    assert kinds([*rows(20), *rows(1, 21, grad_norm=101.0)]) == ["exploding_gradients"]
    assert kinds([*rows(20), *rows(1, 21, grad_norm="inf")]) == ["exploding_gradients"]


def test_throughput_that_stands_still() -> None:
    assert kinds(rows(3, toks_per_s="1234.567")) == []
    assert kinds(rows(4, toks_per_s="1234.567")) == ["throughput_flatline"]
    # The older files round to whole tokens: 39, 39, 39, 39 is an honest reading.
    assert kinds(rows(50, toks_per_s="39")) == []
    assert kinds([*rows(20), *rows(4, 21, toks_per_s=lambda s: f"{s * 0.001:.6f}")]) == [
        "throughput_flatline"
    ]
    assert kinds(rows(9, toks_per_s="1234.567"), Thresholds(flatline_n=0)) == []


def test_memory_that_only_grows() -> None:
    assert kinds(rows(70, mem_mib=lambda step: 300 + 10 * step)) == ["memory_growth"]
    assert kinds(rows(200, mem_mib=lambda step: 300 + 10 * min(step, 40))) == []  # a plateau
    assert kinds(rows(300, mem_mib=lambda step: 300 + 200 * (step % 30 == 0))) == []  # a saw
    assert kinds(rows(300, mem_mib=lambda step: 300 + 0.5 * step)) == []  # 25 MiB in 50 steps


def by_layers(*readings: tuple[object, object, object, object]) -> list[str]:
    names = ("entropy", "max_gate", "entropy_mean", "max_gate_mean")
    detector = Detectors(Thresholds())
    rows = ({"step": "7", **dict(zip(names, map(str, r), strict=True))} for r in readings)
    return [found.kind for row in rows for found in detector.feed(row)]


def test_a_collapse_in_the_mean_over_the_layers_is_one_and_one_layer_alone_is_none() -> None:
    layer, model, good = (0.01, 0.99, 0.9, 0.4), (0.01, 0.99, 0.1, 0.4), (0.9, 0.4, 0.9, 0.4)
    assert by_layers(layer, layer, good, layer, layer) == []
    assert by_layers(*[layer] * 9) == []
    assert by_layers(*[model] * 9) == ["gate_collapse"]
    high = (0.01, 0.99, 0.5, 0.95)
    assert by_layers(*[high] * 3) == ["gate_collapse"]
    assert by_layers(layer, layer, layer, model, model, model) == ["gate_collapse"]
    unknown, limits = (0.01, 0.99, "nan", "nan"), (0.2, 0.9, 0.2, 0.9)
    assert by_layers(*[unknown] * 3) == ["gate_collapse"]
    assert by_layers(*[limits] * 9) == []  # the limits themselves are allowed
    without_means = [("0.1", "0.5", "", "")] * 3
    assert by_layers(*without_means) == ["gate_collapse"]


@given(st.lists(st.dictionaries(st.sampled_from(["step", "loss", "grad_norm", "toks_per_s",
       "mem_mib", "entropy"]), st.text(max_size=8)), max_size=30))  # fmt: skip
def test_no_text_makes_a_detector_fail(readings: list[dict[str, str]]) -> None:
    detectors = Detectors(Thresholds())
    for row in readings:
        list(detectors.feed(row))
