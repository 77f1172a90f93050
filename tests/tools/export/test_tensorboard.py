"""TensorBoard's own reader finds the curves, the numbers and the verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runbook.errors import UsageError
from runbook.tools.export.tensorboard import write_tensorboard
from tests.reports import samples

pytest.importorskip("tensorboard", reason="nsa-runbook[tensorboard] is not installed")

CSV = (
    "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s,host_s\n"
    "1,5.5,0.1,100.5,256,2.0,1.5,300,on,0,1,0.1,0.2\n"
    "2,nan,0.1,200.5,256,1.0,1.5,300,off,1,0,0.1,0.2\n"
    "3,4.5,0.1,"
)


def run_folder(tmp_path: Path) -> Path:
    launch = tmp_path / "run" / "baseline" / "launch_0"
    launch.mkdir(parents=True)
    (launch / "training.csv").write_text(CSV)
    return tmp_path / "run"


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_the_curves_of_a_launch_step_by_step(tmp_path: Path) -> None:
    record = samples.go()
    written = write_tensorboard(record, run_folder(tmp_path), tmp_path / "boards")
    top = tmp_path / "boards" / record.run_id
    assert written == [top, top / "baseline" / "launch_0"]
    board = events(written[1])
    tags = board.Tags()["scalars"]
    assert {"loss", "lr", "toks_per_s", "dt_s", "grad_norm", "mem_mib"} <= set(tags)
    assert not {"step", "arm", "block", "warmup"} & set(tags)
    rates = board.Scalars("toks_per_s")
    assert [(one.step, one.value) for one in rates] == [(1, 100.5), (2, 200.5)]
    assert rates[1].wall_time - rates[0].wall_time == pytest.approx(1.0)
    assert [one.step for one in board.Scalars("loss")] == [1], (
        "no point for NaN, none for half a row"
    )


def test_the_checks_numbers_and_the_verdict(tmp_path: Path) -> None:
    record = samples.go()
    top, *_ = write_tensorboard(record, run_folder(tmp_path), tmp_path / "boards")
    board = events(top)
    (one,) = board.Scalars("baseline.throughput")
    assert (one.step, one.value) == (100, 47.25)
    (text,) = board.Tensors("verdict")
    assert text.tensor_proto.string_val == [record.headline.encode()]


def test_what_is_there_is_never_changed(tmp_path: Path) -> None:
    root = run_folder(tmp_path)
    write_tensorboard(samples.go(), root, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="exists; remove it, or name another folder"):
        write_tensorboard(samples.go(), root, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_neither_torch_nor_tensorflow_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.reports import samples\n"
        "from runbook.tools.export.tensorboard import write_tensorboard\n"
        "write_tensorboard(samples.go(), Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print([name for name in ('torch', 'tensorflow') if name in sys.modules])\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_folder(tmp_path)), str(tmp_path / "b")],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
