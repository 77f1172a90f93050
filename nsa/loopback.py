"""torchrun whose rendezvous listens on the loopback interface only: `python -m nsa.loopback ...`.

Takes torchrun's arguments; `--rdzv-endpoint=127.0.0.1:PORT` is needed. torch's own store listens on
every interface and unpickles what it is sent, so on one machine a stranger on the network could
reach it. Here the socket is bound to 127.0.0.1 before the store gets it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from nsa.torch_env import for_good

with for_good():
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.run import main as torchrun

HOST = "127.0.0.1"
BACKEND = "loopback"
_TIMEOUT_S = 600
# How often torchrun looks whether its ranks have ended; by itself every 0.1 s.
_LOOK_S = 0.02


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of a launch that lives on this machine alone: one node, ours."""

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """torch's own, over a store of ours. Raises OSError if the port is taken."""
        if self._store is None:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, self.master_port))
            listener.listen()
            self._store = TCPStore(
                HOST, self.master_port, 1, True, self.timeout, multi_tenant=True,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        return super().next_rendezvous()


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, _, port = parameters.endpoint.rpartition(":")
    if host != HOST or not port.isdigit():
        raise ValueError(f"--rdzv-endpoint={parameters.endpoint!r}: must be {HOST}:PORT")
    return LoopbackRendezvous(HOST, int(port), 0, 1, parameters.run_id, _TIMEOUT_S)


def main(argv: Sequence[str]) -> None:
    """torchrun with this rendezvous."""
    rendezvous_handler_registry.register(BACKEND, _create)
    torchrun([f"--rdzv-backend={BACKEND}", f"--monitor-interval={_LOOK_S}", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
    # All ranks ended well, and tearing torch down only takes time.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
