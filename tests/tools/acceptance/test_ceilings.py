"""The stage `ceilings`: a rate under a limit that decides is named; one shown only is not."""

from __future__ import annotations

import pytest

from runbook.config import load_profile
from runbook.tools.acceptance.ceilings import ceilings_launch, judge, main, table
from runbook.tools.acceptance.state import read_result


def run(matmul: float, most: float | None = None) -> dict[str, dict[str, object]]:
    rates = {"rate": matmul, "most": matmul if most is None else most}
    return {"matmul": {**rates, "unit": "TFLOP/s", "how": "bf16, 8192 x 8192 x 8192"}}


def test_below_a_limit_in_every_launch() -> None:
    profile = load_profile("h200x1")
    limit = profile.limits["ceiling_matmul_tflops"].value
    assert judge([run(limit - 1), run(limit + 1)], profile) == []
    (text,) = judge([run(limit - 1), run(limit - 2)], profile)
    assert text.startswith(f"matmul {limit - 1:.4g} is below {limit:g} (")
    assert judge([run(0.001)], load_profile("cpu")) == []
    assert "at least" in table([run(limit)], profile)


@pytest.mark.parametrize("name", ["h200x1", "h100x1", "a100x2_pcie4"])
def test_more_than_the_data_sheet_allows_was_not_measured(name: str) -> None:
    """It passed: only rates below a limit were looked at."""
    profile = load_profile(name)
    peak = profile.hardware.peaks["matmul"]
    healthy, beyond = 0.9 * peak.value, 1.2 * peak.value
    assert judge([run(healthy)], profile) == []
    for odd in (run(beyond), run(healthy, beyond)):
        (text,) = judge([run(healthy), odd], profile)
        assert text.startswith(f"matmul {beyond:.4g} is more than 1.03 times the {peak.value:g} ")
        assert peak.source in text


def test_the_launch_is_such_as_preflight_makes() -> None:
    assert ceilings_launch(load_profile("h200x1"), 1).argv == (
        *("python", "-m", "nsa.ceilings", "--device", "cuda"),
    )
    assert ceilings_launch(load_profile("cpu"), 1).argv[0] == "torchrun"


@pytest.mark.slow
@pytest.mark.e2e
def test_on_a_cpu(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert main(["--out", str(tmp_path), "--profile", "cpu", "--stand-in"]) == 0
    result = read_result(tmp_path)
    runs = result["runs"]
    assert isinstance(runs, list) and len(runs) == 3
    assert all(set(one) == {"matmul", "memory_copy", "all_reduce"} for one in runs)
