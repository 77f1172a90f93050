"""Faults of a process: how it ends, where it hangs, what it says to the others, its clock."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from nsa.inject.hooks import (
    FOREVER_S,
    Injector,
    Install,
    at_step,
    change_loss,
    count_steps,
    hang_in,
    in_backward,
    instead,
    only_with,
    sleep_before,
    wrap,
)

_CLOCK_JUMP_S = 3600.0
_GRANDCHILD = ("sleep", "600")
# Of the device's clock: most of a day.
_FOREVER_CYCLES = 10**14

# -- ends ------------------------------------------------------------------------------------------


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


# -- hangs -----------------------------------------------------------------------------------------


def _sleep(_engine: Any) -> None:
    time.sleep(FOREVER_S)


def _spin(_engine: Any) -> None:
    while True:
        pass


def _sleep_in_backward(injector: Injector) -> None:
    def stuck(grad: Any) -> Any:
        time.sleep(FOREVER_S)
        return grad

    change_loss(injector, lambda loss: in_backward(loss, stuck))


# -- collectives -----------------------------------------------------------------------------------


def _extra_all_reduce(engine: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3, device=engine.device))


def _other_op(engine: Any) -> None:
    import torch
    import torch.distributed as dist

    mine = torch.ones(5, device=engine.device)
    dist.all_gather([torch.ones_like(mine) for _ in range(dist.get_world_size())], mine)


def _other_shape(injector: Injector) -> None:
    """One rank reduces one element fewer than the others."""
    import torch.distributed as dist

    count_steps(injector)

    def make(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        def smaller(tensor: Any, *args: Any, **options: Any) -> Any:
            if injector.due() and tensor.numel() > 1:
                injector.mark()
                tensor = tensor.flatten()[:-1].clone()
            return all_reduce(tensor, *args, **options)

        return smaller

    wrap(dist, "all_reduce", make)


def _stuck_stream(_engine: Any) -> None:
    """Work on the GPU that never ends: the collectives after it wait until NCCL's watchdog acts.

    With one rank it is the only way to a timeout of NCCL's own, since nobody else can be late.
    """
    import torch

    sleep: Any = torch.cuda._sleep
    sleep(_FOREVER_CYCLES)


def _late(seconds: float) -> Callable[[Any], None]:
    return lambda _engine: time.sleep(seconds)


# -- clocks and slow phases ------------------------------------------------------------------------


def _jump_clock(_engine: Any) -> None:
    real = time.time
    time.time = lambda: real() + _CLOCK_JUMP_S


def _jump_clock_and_sleep(engine: Any) -> None:
    _jump_clock(engine)
    time.sleep(FOREVER_S)


def _slow_phases(injector: Injector) -> None:
    """A healthy run with a first step, an evaluation and a checkpoint longer than a step's budget.

    STEP is read as the seconds that each takes.
    """
    from nsa.train import evaluation
    from nsa.train.checkpoint.write import Checkpoints

    seconds = float(injector.step)

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*args: Any, **options: Any) -> Any:
            if injector.here:
                time.sleep(seconds)
            return real(*args, **options)

        return slowly

    def first(_engine: Any) -> None:
        time.sleep(seconds)

    wrap(Checkpoints, "begin", slow)
    wrap(evaluation, "evaluate", slow)
    injector.step = 1
    at_step(first)(injector)


PROCESS_KINDS: dict[str, Install] = {
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
    "sleep_backward": _sleep_in_backward,
    "stop": at_step(_end_by(signal.SIGSTOP)),
    "hang_init": hang_in("nsa.train.session", "Engine"),
    "hang_eval": hang_in("nsa.train.evaluation", "evaluate"),
    "hang_checkpoint": hang_in("nsa.train.checkpoint.write", "Checkpoints.begin"),
    "hang_exit": hang_in("nsa.train.session", "parameter_hash"),
    "data_stall": instead("nsa.data.generated", "GeneratedSource.fetch", sleep_before),
    "extra_collective": at_step(_extra_all_reduce),
    "other_op": at_step(_other_op),
    "other_shape": _other_shape,
    "stuck_stream": at_step(_stuck_stream),
    "late_20ms": at_step(_late(0.02), every=True),
    "late_100ms": at_step(_late(0.1), every=True),
    "clock_jump": at_step(_jump_clock),
    "clock_jump_hang": at_step(_jump_clock_and_sleep),
    "slow_phases": _slow_phases,
    "exit_with_static_graph": only_with("NSA_DDP_STATIC_GRAPH", "1", lambda _engine: os._exit(7)),
    "hang_with_compression": only_with("NSA_DDP_COMPRESS", "bf16", _sleep),
}
