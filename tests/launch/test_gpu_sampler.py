"""GPU samples, from a stand-in that prints what nvidia-smi prints and goes on until it is ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runbook.read import read_launch
from runbook.read.documents import GPU_SAMPLES
from tests.launch.helpers import fake_launch, run

LINES = """\
2026/11/21 04:00:00.123, 0, 97, 49152, 81920, 301.50, 61, 1410, 0x0000000000000000, 4, 16, GPU-aa
2026/11/21 04:00:00.125, 1, 95, 49000, 81920, [N/A], 60, 1410, 0x0000000000000004, 4, 16, GPU-bb
"""


HELP = '"clocks_event_reasons.active"\\nBitmask of active clock event reasons.'


def stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, *, listed: str = HELP
) -> None:
    script = folder / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\nif [ $1 = --help-query-gpu ]; then printf '{listed}'; exit; fi\n"
        "if [ $1 = -q ]; then echo 'NVIDIA-SMI has failed'; exit 9; fi\n"
        f"echo $1 >{folder}/asked\n"
        f"cat <<'EOF'\n{text}EOF\nprintf '2026/11/21 04:0'\nsleep 60\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_samples_are_taken_while_the_launch_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, LINES)
    launch = fake_launch(steps=20)
    evidence = read_launch(tmp_path, launch, run(launch, tmp_path))
    assert evidence.problems == ()
    samples = evidence.gpu_samples
    assert samples is not None and samples["index"].tolist() == [0, 1]
    assert samples["utilization_percent"].tolist() == [97, 95]
    assert samples["power_w"].isna().tolist() == [False, True]
    assert samples["throttle_reasons"].iloc[1].endswith("4")
    assert samples["uuid"].tolist() == ["GPU-aa", "GPU-bb"]
    assert evidence.gpu_samples_path == "baseline/one/gpu_samples.csv"


def test_what_nvidia_smi_says_instead_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "Unable to determine the device handle: Unknown Error\n")
    launch = fake_launch(steps=20)
    evidence = read_launch(tmp_path, launch, run(launch, tmp_path))
    assert evidence.problems == ()
    assert evidence.gpu_samples is not None and len(evidence.gpu_samples) == 0
    said = tmp_path / "baseline/one/gpu_sampler.txt"
    assert "Unable to determine" in said.read_text()


@pytest.mark.parametrize(
    ("listed", "asked"),
    [
        (HELP, "clocks_event_reasons.active"),
        ('"clocks_throttle_reasons.active"', "clocks_throttle_reasons.active"),
        (
            '"clocks_throttle_reasons.active" or "clocks_event_reasons.active"',
            "clocks_event_reasons.active",
        ),
    ],
)
def test_a_field_is_asked_for_by_the_name_that_this_driver_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, asked: str
) -> None:
    stand_in(tmp_path, monkeypatch, LINES, listed=listed)
    run(fake_launch(steps=20), tmp_path)
    (query,) = (tmp_path / "asked").read_text().split()
    fields = query.removeprefix("--query-gpu=").split(",")
    assert asked in fields and len(fields) == GPU_SAMPLES.columns.index("uuid") + 1
    assert len([name for name in fields if "reasons" in name]) == 1
