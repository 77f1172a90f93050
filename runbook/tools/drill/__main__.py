"""A harness to be killed: `-m runbook.tools.drill FAULT STEP ROOT` runs one injected launch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from runbook.launch import StopRequest, stop_on_signals
from runbook.tools.drill.faults import FAULTS
from runbook.tools.drill.scene import run_injected


def main(argv: list[str]) -> int:
    """Run the launch under this program's own signal handlers."""
    with stop_on_signals(StopRequest()) as stop:
        fault = replace(FAULTS[argv[0]], step=int(argv[1]))
        scene = run_injected(fault, Path(argv[2]), stop=stop)
    return 0 if scene.result.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
