"""Stands for torchrun on one node: the fake trainer as the one rank of it, and how that ended.

Started on each node; the node's number is the rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FAKE = Path(__file__).parents[1] / "launch/fake_trainer.py"


def main() -> int:
    rank = int(Path(os.environ["RUNBOOK_NODE_FOLDER"]).name[1:])
    child = subprocess.Popen(
        [sys.executable, str(FAKE), *sys.argv[1:]], env={**os.environ, "RANK": str(rank)}
    )
    code = child.wait()
    if code:
        print(f"failed (exitcode: {code}) local_rank: 0 (pid: {child.pid})", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
