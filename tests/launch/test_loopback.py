"""The rendezvous of a launch on one machine: its store is on the loopback, on any torch."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from nsa import loopback
from nsa.torch_env import installed_torch, libuv_takes_socket
from runbook.launch.command import free_port


@pytest.mark.parametrize(
    ("torch", "takes"),
    [("2.6.0+cu124", False), ("2.7.1", False), ("2.8.0", True), ("2.15.0", True), (None, True)],
)
def test_torch_before_28_gets_the_store_without_libuv(torch: str | None, takes: bool) -> None:
    assert libuv_takes_socket(torch) is takes


@pytest.mark.parametrize("takes", sorted({False, libuv_takes_socket(installed_torch())}))
def test_ranks_reach_either_store(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    """They connect as torch's `env://` does, as clients that take the store for one on libuv."""
    monkeypatch.setattr(loopback, "libuv_takes_socket", lambda version: takes)
    port = free_port()
    info = loopback.LoopbackRendezvous(port, "run").next_rendezvous()
    client = dist.TCPStore(loopback.HOST, port, is_master=False, timeout=timedelta(seconds=20))
    client.set("a", "1")
    assert client.get("a") == b"1" and client.add("n", 2) == 2
    assert client.multi_get(["a", "n"]) == [b"1", b"2"]
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_port == port
