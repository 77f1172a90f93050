"""What a page costs: no heavy package is loaded, and a long run gives no large file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runbook.engine.outputs import render
from runbook.records import RunRecord
from runbook.records.shown import MAX_POINTS
from tests.reports.samples import go

HEAVY = ("torch", "pandas", "numpy", "scipy", "matplotlib")
PAGE_KIB = 600


def test_rendering_loads_no_heavy_package(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(go().model_dump_json(), encoding="utf-8")
    script = (
        "import sys\nfrom runbook.cli import main\n"
        "code = main(['report', sys.argv[1], '--format', 'md,details,html,junit,terminal'])\n"
        f"print(code, *sorted({HEAVY!r} & sys.modules.keys()))\n"
    ).replace(f"{HEAVY!r}", f"set({HEAVY!r})")
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0"


def test_a_run_with_long_traces_is_one_page_of_moderate_size() -> None:
    """Nine phases with four full curves each, which is more than any run has."""
    record = go()
    phase = record.phases[-1]
    curve = phase.series[0]
    points = tuple((float(3 * n), 40.0 + n % 7 + n / 1e3) for n in range(MAX_POINTS))
    full = tuple(curve.model_copy(update={"name": f"c{n}", "points": points}) for n in range(4))
    phases = tuple(
        phase.model_copy(update={"name": f"p{n}", "checks": (), "series": full}) for n in range(9)
    )
    changed = RunRecord.model_validate(record.model_copy(update={"phases": phases}).model_dump())
    assert len(render(changed, "html").encode()) < PAGE_KIB * 1024


@pytest.mark.parametrize("address", ["http:", "https:", "//cdn", "url(", "@import", "src="])
def test_nothing_is_fetched(address: str) -> None:
    assert address not in render(go(), "html")
