"""The rendezvous of a launch on one machine: its store is on the loopback."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from nsa import loopback
from runbook.launch.command import free_port


def test_ranks_reach_the_store() -> None:
    """They connect as torch's `env://` does."""
    port = free_port()
    info = loopback.LoopbackRendezvous(port, "run").next_rendezvous()
    client = dist.TCPStore(loopback.HOST, port, is_master=False, timeout=timedelta(seconds=20))
    client.set("a", "1")
    assert client.get("a") == b"1" and client.add("n", 2) == 2
    assert client.multi_get(["a", "n"]) == [b"1", b"2"]
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_port == port
