"""The bundled trainer, whose rank 1 never comes back from the backward pass of step 20."""

from __future__ import annotations

import os
import sys

from nsa.inject import main

if __name__ == "__main__":
    code = main(["sleep_backward", "1", "20", "--", *sys.argv[1:]])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
