"""The bundled trainer, whose rank 1 keeps half a MiB more in every step from step 30 on."""

from __future__ import annotations

import os
import sys
from typing import Any

from nsa.inject import Injector, at_step
from nsa.train.__main__ import main

_STEP_BYTES = 512 << 10
_kept: list[bytearray] = []


def _leak(_engine: Any) -> None:
    _kept.append(bytearray(b"x" * _STEP_BYTES))


if __name__ == "__main__":
    at_step(_leak, every=True)(Injector("leak", 1, 30))
    sys.exit(main(sys.argv[1:], os.environ))
