"""The one builder of torchrun's commands: on this machine, as typed, and over several nodes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

# torchrun's own folder of logs: without it, one is left in the machine's folder for temporary files
# by every launch, empty. What the ranks write goes to the launch's console log.
_NO_LOG_FOLDER = f"--log-dir={os.devnull}"


def as_typed(words: Sequence[str]) -> list[str]:
    """torchrun by this Python with these words."""
    return [sys.executable, "-m", "torch.distributed.run", _NO_LOG_FOLDER, *words]


def on_loopback(words: Sequence[str], port: int) -> list[str]:
    """torchrun by this Python with these words, whose ranks meet on the loopback interface."""
    rendezvous = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    return [sys.executable, "-m", "nsa.loopback", _NO_LOG_FOLDER, *rendezvous, *words]


def rendezvous(endpoint: str, number: str) -> list[str]:
    """The words with which the agents of several nodes meet at an address and port."""
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={number}"]


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port at one of this machine's addresses that nobody listens on right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
