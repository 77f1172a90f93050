"""The bundled trainer, whose rank 1 raises at step 20, but trains once OUT/crashed is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nsa.contract import RUN_DIR_VARIABLE

# OUT/RUN/PHASE/LAUNCH
_MARK = Path(os.environ[RUN_DIR_VARIABLE]).parents[2] / "crashed"


def main(words: list[str]) -> int:
    """Train, or train until the crash."""
    if _MARK.exists():
        from nsa.train.__main__ import main as train

        return train(words, os.environ)
    from nsa.inject import main as inject

    code = inject(["exception", "1", "20", "--", *words])
    _MARK.touch()
    return code


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
