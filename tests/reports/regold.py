"""Write the golden reports anew: `python -m tests.reports.regold`, then read the difference."""

from __future__ import annotations

from runbook.engine.derive import write_reports
from tests.reports.samples import GOLDEN, SAMPLES


def main() -> None:
    for name, make in SAMPLES.items():
        write_reports(make(), GOLDEN / name)


if __name__ == "__main__":
    main()
