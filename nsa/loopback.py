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
from datetime import timedelta

from nsa.torch_env import for_good

with for_good():
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )
    from torch.distributed.run import main as torchrun

HOST = "127.0.0.1"
BACKEND = "loopback"
_TIMEOUT = timedelta(minutes=10)
# How often torchrun looks whether its ranks have ended; by itself every 0.1 s.
_LOOK_S = 0.02


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a launch that lives on this machine alone."""

    def __init__(self, port: int, run_id: str) -> None:
        self._port, self._run_id = port, run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of the agent's store and open none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """One node, ours. Raises OSError if the port is taken."""
        if self._store is None:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, self._port))
            listener.listen()
            self._store = TCPStore(
                HOST, self._port, 1, True, _TIMEOUT, multi_tenant=True,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        info = RendezvousStoreInfo(HOST, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, info)

    def is_closed(self) -> bool:
        """Never: there is one round."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """No other node can wait."""
        return 0

    def get_run_id(self) -> str:
        """The id that torchrun gave."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store goes with the process."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, _, port = parameters.endpoint.rpartition(":")
    if host != HOST or not port.isdigit():
        raise ValueError(f"--rdzv-endpoint={parameters.endpoint!r}: must be {HOST}:PORT")
    return LoopbackRendezvous(int(port), parameters.run_id)


def register() -> str:
    """Make it known to torchrun; returns the name that torchrun has to be given."""
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def main(argv: Sequence[str]) -> None:
    """torchrun with this rendezvous."""
    torchrun([f"--rdzv-backend={register()}", f"--monitor-interval={_LOOK_S}", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
    # All ranks ended well, and tearing torch down only takes time.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
