"""Faults of what a process holds and writes: numbers, memory, files."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa.contract import HEARTBEATS, RUN_DIR_VARIABLE, TRAINING_CSV
from nsa.inject.hooks import Install, at_step, in_backward, instead, loss_as

# -- numbers ---------------------------------------------------------------------------------------


def _scaled_gradient(factor: float) -> Callable[[Any], Any]:
    return lambda loss: in_backward(loss, lambda grad: grad * factor)


def _silence_gradients(engine: Any) -> None:
    for parameter in engine.model.parameters():
        parameter.register_hook(lambda grad: grad * 0.0)


def _drift(engine: Any) -> None:
    import torch

    with torch.no_grad():
        next(engine.model.parameters()).add_(1.0)


def _collapse_gates(engine: Any) -> None:
    import torch

    for name, parameter in engine.model.named_parameters():
        if name.endswith("gate_bias"):
            with torch.no_grad():
                parameter.view(-1, 3).copy_(torch.tensor([-60.0, 60.0, -60.0]))


_hoard: list[bytearray] = []


def _leak(_engine: Any) -> None:
    _hoard.append(bytearray(b"x" * (24 << 20)))


# -- memory and disk -------------------------------------------------------------------------------


def _device_oom(_engine: Any) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def _host_oom(_engine: Any) -> None:
    import torch

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.ones(1 << 28)


def _full_disk_for(pattern: str) -> Callable[[Any], None]:
    """Point the rank's open file at /dev/full: every write from now on is a real ENOSPC."""

    def fill(_engine: Any) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        for link in Path("/proc/self/fd").iterdir():
            try:
                target = link.readlink()
            except OSError:
                continue
            if target.match(pattern):
                os.dup2(full, int(link.name))

    return fill


def _in_small_files(begin: Callable[..., Any], *args: Any, **options: Any) -> Any:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    return begin(*args, **options)


def _tear_the_csv(tail: bytes) -> Callable[[Any], None]:
    def tear(_engine: Any) -> None:
        path = Path(os.environ[RUN_DIR_VARIABLE]) / TRAINING_CSV
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(handle, tail)
        os.kill(os.getpid(), signal.SIGKILL)

    return tear


VALUE_KINDS: dict[str, Install] = {
    "nan": loss_as(lambda loss: loss * float("nan")),
    "inf": loss_as(lambda loss: loss * float("inf")),
    "loss_spike": loss_as(lambda loss: loss * 5.0),
    "exploding": loss_as(_scaled_gradient(1e6)),
    "zero_gradients": at_step(_silence_gradients),
    "gate_collapse": at_step(_collapse_gates),
    "drift": at_step(_drift),
    "flatline": instead("nsa.step.clock", "Mark.seconds", lambda _real, _mark: 0.125),
    "leak": at_step(_leak, every=True),
    "device_oom": at_step(_device_oom),
    "host_oom": at_step(_host_oom),
    "csv_full": at_step(_full_disk_for(TRAINING_CSV)),
    "heartbeat_full": at_step(_full_disk_for(HEARTBEATS.glob())),
    "checkpoint_full": instead("nsa.train.checkpoint.write", "Checkpoints.begin", _in_small_files),
    "torn_csv": at_step(_tear_the_csv(b"60,5.5,0.001,1")),
    "nul_csv": at_step(_tear_the_csv(b"\0" * 512)),
}
