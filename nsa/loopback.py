"""torchrun whose rendezvous listens on the loopback interface only: `python -m nsa.loopback ...`.

Takes torchrun's arguments; `--rdzv-endpoint=127.0.0.1:PORT` is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nsa.loading import for_good


def main(argv: Sequence[str]) -> None:
    """torchrun with the rendezvous of `nsa.rendezvous`."""
    with for_good():
        from torch.distributed.run import main as torchrun

        from nsa import rendezvous

    torchrun([f"--rdzv-backend={rendezvous.register()}", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
