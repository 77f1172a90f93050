"""The faults: how a process ends, where it hangs, what it says, and what it holds and writes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nsa.contract import HEARTBEATS, RUN_DIR_VARIABLE, TRAINING_CSV
from nsa.inject import (
    FOREVER_S,
    Injector,
    Install,
    at_step,
    count_steps,
    hang_in,
    in_backward,
    instead,
    loss_as,
    only_with,
    sleep_before,
    wrap,
)

_CLOCK_JUMP_S = 3600.0
_GRANDCHILD = ("sleep", "600")
# Of the device's clock: most of a day.
_FOREVER_CYCLES = 10**14


def _end_by(number: int) -> Callable[[Any], None]:
    return lambda _engine: os.kill(os.getpid(), number)


def _raise(_engine: Any) -> None:
    raise ZeroDivisionError("injected")


def _segfault(_engine: Any) -> None:
    ctypes.string_at(0)


def _kill_parent(_engine: Any) -> None:
    _grandchild(_engine)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def _kill_self_with_grandchild(_engine: Any) -> None:
    _grandchild(_engine)
    os.kill(os.getpid(), signal.SIGKILL)


def _grandchild(_engine: Any) -> None:
    """A process in a session of its own, which nobody's process group reaches."""
    subprocess.Popen(_GRANDCHILD, start_new_session=True, stdin=subprocess.DEVNULL)


def _sleep(_engine: Any, seconds: float = FOREVER_S) -> None:
    time.sleep(seconds)


def _spin(_engine: Any) -> None:
    while True:
        pass


def _sleep_in_backward(loss: Any) -> Any:
    return in_backward(loss, _sleep)


def _extra_all_reduce(engine: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3, device=engine.device))


def _other_op(engine: Any) -> None:
    import torch
    import torch.distributed as dist

    mine = torch.ones(5, device=engine.device)
    dist.all_gather([torch.ones_like(mine) for _ in range(dist.get_world_size())], mine)


def _reduce_less(all_reduce: Callable[..., Any], tensor: Any, **options: Any) -> Any:
    """One rank reduces one element fewer than the others."""
    return all_reduce(tensor.flatten()[:-1].clone(), **options)


def _stuck_stream(_engine: Any) -> None:
    """Work on the GPU that never ends: the collectives after it wait until NCCL's watchdog acts.

    With one rank it is the only way to a timeout of NCCL's own, since nobody else can be late.
    """
    import torch

    sleep: Any = torch.cuda._sleep
    sleep(_FOREVER_CYCLES)


def _jump_clock(_engine: Any) -> None:
    real = time.time
    time.time = lambda: real() + _CLOCK_JUMP_S


def _jump_clock_and_sleep(engine: Any) -> None:
    _jump_clock(engine)
    _sleep(engine)


def _slow_phases(injector: Injector) -> None:
    """A healthy run with a first step, an evaluation and a checkpoint longer than a step's budget.

    STEP is read as the seconds that each takes.
    """
    from nsa.train import checkpoint, settle

    seconds = float(injector.step)

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*args: Any, **options: Any) -> Any:
            if injector.here:
                time.sleep(seconds)
            return real(*args, **options)

        return slowly

    wrap(checkpoint, "start", slow)
    wrap(settle, "evaluate", slow)
    injector.step = 1
    at_step(partial(_sleep, seconds=seconds))(injector)


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


KINDS: dict[str, Install] = {
    "none": count_steps,
    "exit": at_step(lambda _engine: os._exit(7)),
    "kill": at_step(_end_by(signal.SIGKILL)),
    "term": at_step(_end_by(signal.SIGTERM)),
    "segv": at_step(_segfault),
    "abort": at_step(lambda _engine: os.abort()),
    "exception": at_step(_raise),
    "kill_launcher": at_step(_kill_parent),
    "kill_rank": at_step(_kill_self_with_grandchild),
    "grandchild": at_step(_grandchild),
    "sleep": at_step(_sleep),
    "spin": at_step(_spin),
    "sleep_backward": loss_as(_sleep_in_backward),
    "stop": at_step(_end_by(signal.SIGSTOP)),
    "hang_init": hang_in("nsa.train.session", "Engine"),
    "hang_eval": hang_in("nsa.train.settle", "evaluate"),
    "hang_checkpoint": hang_in("nsa.train.checkpoint", "start"),
    "hang_exit": hang_in("nsa.train.session", "parameter_hash"),
    "data_stall": instead("nsa.data.source", "GeneratedSource.fetch", sleep_before),
    "extra_collective": at_step(_extra_all_reduce),
    "other_op": at_step(_other_op),
    "other_shape": instead("torch.distributed", "all_reduce", _reduce_less),
    "stuck_stream": at_step(_stuck_stream),
    "late_20ms": at_step(partial(_sleep, seconds=0.02), every=True),
    "late_100ms": at_step(partial(_sleep, seconds=0.1), every=True),
    "clock_jump": at_step(_jump_clock),
    "clock_jump_hang": at_step(_jump_clock_and_sleep),
    "slow_phases": _slow_phases,
    "exit_with_static_graph": only_with("NSA_DDP_STATIC_GRAPH", "1", lambda _engine: os._exit(7)),
    "hang_with_compression": only_with("NSA_DDP_COMPRESS", "bf16", _sleep),
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
    "checkpoint_full": instead("nsa.train.checkpoint", "start", _in_small_files),
    "torn_csv": at_step(_tear_the_csv(b"60,5.5,0.001,1")),
    "nul_csv": at_step(_tear_the_csv(b"\0" * 512)),
}
