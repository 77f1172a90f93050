"""Entry point: `-m nsa.inject KIND RANK STEP -- ARGUMENTS`, also under torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nsa.inject.hooks import Injector
from nsa.inject.processes import PROCESS_KINDS
from nsa.inject.values import VALUE_KINDS
from nsa.train.__main__ import main as train

KINDS = {**PROCESS_KINDS, **VALUE_KINDS}


def main(argv: Sequence[str]) -> int:
    """Install the fault, then run the trainer in this process. Returns its exit code."""
    cut = argv.index("--")
    kind, rank, step = argv[:cut]
    KINDS[kind](Injector(kind, int(rank), int(step)))
    return train(argv[cut + 1 :], os.environ)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
