"""Take over what the program says now: `python -m tests.frozen.accept [NAME ...]`, then `git diff`.

A difference that is wanted is told in CHANGELOG.md; any other one is a defect of the change.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.frozen import corpus


def main(wanted: Sequence[str]) -> int:
    """Write the expectations of these runs, or of all."""
    for name in wanted or corpus.names():
        with tempfile.TemporaryDirectory() as folder:
            corpus.accept(name, corpus.asked(corpus.unpack(name, Path(folder))))
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
