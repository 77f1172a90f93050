"""Following files that grow, tear and restart, and telling the run directory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from runbook.launch.watch.detectors import Anomaly, Monitor, record_anomaly
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


def test_halt_0_only_tells(tmp_path: Path) -> None:
    record_anomaly(tmp_path, Anomaly(kind="loss_spike", text="x"), halt=False)
    assert (tmp_path / ".anomaly_type").exists() and not (tmp_path / ".HALT").exists()


_GATES = (
    "step,entropy,max_gate,entropy_mean,max_gate_mean,"
    "share_cmp,share_sel,share_win,sel_blocks_mean,sel_forced_share\n"
)


def test_one_layer_that_has_settled_on_a_branch_is_written_down_and_halts_nothing(
    tmp_path: Path,
) -> None:
    alone = "".join(f"{step},0.01,0.99,0.8,0.45,,,,,\n" for step in (5, 10, 15, 20))
    (tmp_path / "gates.csv").write_text(_GATES + alone)
    monitor = Monitor(tmp_path, Thresholds())
    (anomaly,) = monitor.look_and_record()
    assert (anomaly.kind, anomaly.step, anomaly.halts) == ("layer_collapse", 15, False)
    assert "layer_collapse" in (tmp_path / "anomalies.jsonl").read_text()
    assert not (tmp_path / ".HALT").exists() and not (tmp_path / ".anomaly_type").exists()
    all_of_them = "".join(f"{step},0.01,0.99,0.1,0.95,,,,,\n" for step in (25, 30, 35))
    with (tmp_path / "gates.csv").open("a") as table:
        table.write(all_of_them)
    assert [found.kind for found in monitor.look_and_record()] == ["gate_collapse"]
    assert (tmp_path / ".HALT").read_text().startswith("gate_collapse: 3 readings in a row")
    assert (tmp_path / ".anomaly_type").read_text() == (tmp_path / ".HALT").read_text()


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


@pytest.mark.slow
def test_memory_stays_flat_over_50000_steps(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    path.write_text(HEADER)
    monitor = Monitor(tmp_path, Thresholds())
    sizes = []
    tracemalloc.start()
    try:
        with path.open("a") as stream:
            for block in range(50):
                stream.writelines(
                    row(step) for step in range(block * 1000 + 1, block * 1000 + 1001)
                )
                stream.flush()
                assert monitor.look() == []
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert monitor.readings.rows_read == 50_000
    assert max(sizes[10:]) - min(sizes[10:]) < 64 * 1024
    assert path.stat().st_size > 2_000_000
