"""Write the golden reports anew: `python -m tests.reports.regold`, then read the difference."""

from __future__ import annotations

from pathlib import Path

from runbook.engine.derive import write_reports
from tests.reports.samples import SAMPLES

GOLDEN = Path(__file__).parent / "golden"


def main() -> None:
    for name, make in SAMPLES.items():
        folder = GOLDEN / name
        folder.mkdir(parents=True, exist_ok=True)
        write_reports(make(), folder)


if __name__ == "__main__":
    main()
