"""What a page costs: no heavy package is loaded, and a long run gives no large file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runbook.engine.derive import render
from tests.reports.samples import go

HEAVY = ("torch", "pandas", "numpy", "scipy", "matplotlib")


def test_rendering_loads_no_heavy_package(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(go().model_dump_json(), encoding="utf-8")
    script = (
        "import sys\nfrom runbook.cli import main\n"
        "names = ('md', 'details', 'html', 'junit', 'terminal')\n"
        "code = sum(main(['report', sys.argv[1], '--format', name]) for name in names)\n"
        f"print(code, *sorted({HEAVY!r} & sys.modules.keys()))\n"
    ).replace(f"{HEAVY!r}", f"set({HEAVY!r})")
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize("address", ["http:", "https:", "//cdn", "url(", "@import", "src="])
def test_nothing_is_fetched(address: str) -> None:
    assert address not in render(go(), "html")
