"""Following files that grow, tear and restart, and telling the run directory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from runbook.launch.detectors import Anomaly, Monitor, record_anomaly
from runbook.launch.watchdog import Thresholds

HEADER = "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s,host_s\n"


def row(step: int, loss: object = 5.5, rate: float | None = None) -> str:
    shown = 1000 + 7.3 * (step % 11) if rate is None else rate
    return f"{step},{loss},0.1,{shown:.3f},64,0.1,1.0,300.0,,0,0,0.0,0.0\n"


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


def test_gates_csv_is_watched(tmp_path: Path) -> None:
    head = "step,entropy,max_gate,share_cmp,share_sel,share_win,sel_blocks_mean,sel_forced_share\n"
    bad = "".join(f"{step},0.01,0.99,,,,,\n" for step in (5, 10, 15))
    (tmp_path / "gates.csv").write_text(head + bad)
    (anomaly,) = Monitor(tmp_path, Thresholds()).look()
    assert (anomaly.kind, anomaly.step, anomaly.path) == ("gate_collapse", 15, "gates.csv")


def test_the_older_headerless_form_is_watched(tmp_path: Path) -> None:
    lines = [f"{step},5.5,0.1,{40 + step % 3}\n" for step in range(1, 30)]
    (tmp_path / "training.csv").write_text("".join(lines) + "30,nan,0.1,41\n")
    monitor = Monitor(tmp_path, Thresholds())
    assert [a.kind for a in monitor.look()] == ["nonfinite_loss"]
    assert monitor.rows_read == 30


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
    assert monitor.rows_read == 50_000
    assert max(sizes[10:]) - min(sizes[10:]) < 64 * 1024
    assert path.stat().st_size > 2_000_000
