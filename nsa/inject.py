"""The real trainer with one injected fault: `-m nsa.inject KIND RANK STEP -- ARGUMENTS`.

KIND is a name in `KINDS`, RANK one from 0 on or -1 for all, STEP one from 1 on; `runbook drill`
says all three. Runs inside a rank, also under torchrun: it wraps functions of the trainer, waits
for its rank and step, notes the time in `injected.json`, and then does the real thing: a real
signal, a real full disk, a real NaN. The trainer itself knows nothing of it. torch is imported in
here only where a fault needs it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nsa.contract import HEARTBEATS, INJECTED_JSON, RUN_DIR_VARIABLE, TRAINING_CSV
from nsa.launch.process import leave
from nsa.torch_env import for_good

FOREVER_S = 3600.0
EVERY_RANK = -1
_CLOCK_JUMP_S = 3600.0
_GRANDCHILD = ("sleep", "600")
# Of the device's clock: most of a day.
_FOREVER_CYCLES = 10**14

Install = Callable[["Injector"], None]


class Injector:
    """Knows when and where; `KINDS` knows what."""

    def __init__(self, kind: str, rank: int, step: int) -> None:
        self.kind, self.rank, self.step = kind, rank, step
        self.calls = 0
        self.injected = False
        mine = int(os.environ.get("RANK", "0"))
        self.here = rank in (mine, EVERY_RANK)
        self._marks = mine == max(rank, 0)
        self.run_dir = Path(os.environ[RUN_DIR_VARIABLE])

    def due(self) -> bool:
        """Is this the rank, and is the step reached?"""
        return self.here and self.calls >= self.step

    def mark(self) -> None:
        """Write down, once, when it happens; the launch's clock and this one are the same."""
        if not self.injected:
            self.injected = True
            if not self._marks:
                return
            document = {"mono": time.monotonic(), "step": self.calls, "kind": self.kind}
            (self.run_dir / INJECTED_JSON).write_text(json.dumps(document), encoding="utf-8")


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what `make` makes of a function in its place."""
    setattr(owner, name, make(getattr(owner, name)))


def count_steps(injector: Injector, before: Callable[[Any], None] | None = None) -> None:
    """Count the steps, and call `before(engine)` at the start of the due ones' computing."""
    from nsa.step.engine import Engine

    def make(compute: Callable[..., Any]) -> Callable[..., Any]:
        def counted(engine: Any, *args: Any, **options: Any) -> Any:
            injector.calls += 1
            if before is not None and injector.due():
                injector.mark()
                before(engine)
            return compute(engine, *args, **options)

        return counted

    wrap(Engine, "compute", make)


def at_step(act: Callable[[Any], None], *, every: bool = False) -> Install:
    """Call `act(engine)` before the step's computing, or before that of every later one too."""

    def install(injector: Injector) -> None:
        def before(engine: Any) -> None:
            if every or injector.calls == injector.step:
                act(engine)

        count_steps(injector, before)

    return install


def instead(
    module: str, name: str, act: Callable[..., Any], *, at_once: bool = False, once: bool = False
) -> Install:
    """Call `act(function, its arguments)` in the place of a function of the trainer when due.

    at_once: on the rank's first call already, whatever the step. once: in the place of one call.
    """

    def install(injector: Injector) -> None:
        count_steps(injector)

        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*args: Any, **options: Any) -> Any:
                due = injector.here if at_once else injector.due()
                if not due or (once and injector.injected):
                    return real(*args, **options)
                injector.mark()
                return act(real, *args, **options)

            return changed

        owner: Any = importlib.import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        wrap(owner, last, make)

    return install


def sleep_before(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Sleep for longer than anybody waits, then call the function."""
    time.sleep(FOREVER_S)
    return real(*args, **options)


def hang_in(module: str, name: str) -> Install:
    """Sleep when a function of the trainer is called."""
    return instead(module, name, sleep_before, at_once=True)


def in_backward(loss: Any, act: Callable[[Any], Any]) -> Any:
    """A node of the graph that calls `act(gradient)` when the backward pass reaches it."""
    loss = loss * 1.0
    loss.register_hook(act)
    return loss


def loss_as(change: Callable[[Any], Any]) -> Install:
    """Give `change(loss)` to the backward pass, once: the first loss in a step is the step's."""

    def act(loss: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return change(loss(*args, **options))

    return instead("nsa.step.engine", "Engine.loss", act, once=True)


# -- the faults ------------------------------------------------------------------------------------


def _exit_with_static_graph(engine: Any) -> None:
    """A fault that a toggle brings about: for the triage, which has to find the toggle."""
    if engine.plan.toggles.flag("NSA_DDP_STATIC_GRAPH"):
        os._exit(7)


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

    wrap(checkpoint, "async_save", slow)
    wrap(settle, "evaluate", slow)
    injector.step = 1
    at_step(partial(_sleep, seconds=seconds))(injector)


def _silence_gradients(engine: Any) -> None:
    for parameter in engine.model.parameters():
        parameter.register_hook(lambda grad: grad * 0.0)


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
    "sleep_backward": loss_as(partial(in_backward, act=_sleep)),
    "stop": at_step(_end_by(signal.SIGSTOP)),
    "hang_init": hang_in("nsa.train.session", "Engine"),
    "hang_eval": hang_in("nsa.train.settle", "evaluate"),
    "hang_checkpoint": hang_in("nsa.train.checkpoint", "async_save"),
    "hang_exit": hang_in("nsa.train.session", "parameter_hash"),
    "data_stall": instead("nsa.data", "GeneratedSource.fetch", sleep_before),
    "extra_collective": at_step(_extra_all_reduce),
    "other_op": at_step(_other_op),
    "other_shape": instead("torch.distributed", "all_reduce", _reduce_less),
    "stuck_stream": at_step(_stuck_stream),
    "late_20ms": at_step(partial(_sleep, seconds=0.02), every=True),
    "late_100ms": at_step(partial(_sleep, seconds=0.1), every=True),
    "clock_jump": at_step(_jump_clock),
    "clock_jump_hang": at_step(_jump_clock_and_sleep),
    "slow_phases": _slow_phases,
    "exit_with_static_graph": at_step(_exit_with_static_graph),
    "nan": loss_as(lambda loss: loss * float("nan")),
    "inf": loss_as(lambda loss: loss * float("inf")),
    "loss_spike": loss_as(lambda loss: loss * 5.0),
    "exploding": loss_as(partial(in_backward, act=lambda grad: grad * 1e6)),
    "zero_gradients": at_step(_silence_gradients),
    "gate_collapse": at_step(_collapse_gates),
    "flatline": instead("nsa.step.numbers", "Mark.seconds", lambda _real, _mark: 0.125),
    "leak": at_step(_leak, every=True),
    "device_oom": at_step(_device_oom),
    "host_oom": at_step(_host_oom),
    "csv_full": at_step(_full_disk_for(TRAINING_CSV)),
    "heartbeat_full": at_step(_full_disk_for(HEARTBEATS.glob())),
    "checkpoint_full": instead("nsa.train.checkpoint", "async_save", _in_small_files),
    "torn_csv": at_step(_tear_the_csv(b"60,5.5,0.001,1")),
    "nul_csv": at_step(_tear_the_csv(b"\0" * 512)),
}


def main(argv: Sequence[str]) -> int:
    """Install the fault, then run the trainer in this process. Returns its exit code."""
    kind, rank, step, _, *arguments = argv
    with for_good():
        KINDS[kind](Injector(kind, int(rank), int(step)))
        from nsa.train.__main__ import main as train

    return train(arguments, os.environ)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
