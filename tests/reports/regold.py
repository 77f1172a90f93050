"""Write the golden reports anew: `python -m tests.reports.regold`, then read the difference."""

from __future__ import annotations

from pathlib import Path

from runbook.config import registry
from runbook.engine.outputs import write_reports
from tests.reports.samples import SAMPLES

GOLDEN = Path(__file__).parent / "golden"
# The HTML page is long: one is kept whole, the others are checked by their structure.
HTML_SAMPLE = "no_go"


def formats_of(sample: str) -> list[str]:
    return [name for name in registry.report_names() if name != "html" or sample == HTML_SAMPLE]


def main() -> None:
    for name, make in SAMPLES.items():
        folder = GOLDEN / name
        folder.mkdir(parents=True, exist_ok=True)
        write_reports(make(), folder, formats_of(name))


if __name__ == "__main__":
    main()
