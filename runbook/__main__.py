"""`python -m runbook` does what the `runbook` command does."""

from __future__ import annotations

import sys

from runbook.cli import main

if __name__ == "__main__":
    sys.exit(main())
