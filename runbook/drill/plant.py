"""The real trainer with one planted fault: `-m runbook.drill.plant KIND RANK STEP -- ARGUMENTS`.

Runs inside a rank. It wraps functions of the trainer, waits for its rank and step, notes the time
in `planted.json`, and then does the real thing: a real signal, a real full disk, a real NaN. The
trainer itself knows nothing of it. torch is imported in here only where a fault needs it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_EVERY_RANK = -1
_FOREVER_S = 3600.0
_CLOCK_JUMP_S = 3600.0
_GRANDCHILD = ("sleep", "600")


class Planter:
    """Knows when and where; `KINDS` knows what."""

    def __init__(self, kind: str, rank: int, step: int) -> None:
        self.kind, self.rank, self.step = kind, rank, step
        self.calls = 0
        self.planted = False
        mine = int(os.environ.get("RANK", "0"))
        self.here = rank in (mine, _EVERY_RANK)
        self._marks = mine == max(rank, 0)
        self.run_dir = Path(os.environ["RUNBOOK_RUN_DIR"])

    def due(self) -> bool:
        """Is this the rank, and is the step reached?"""
        return self.here and self.calls >= self.step

    def mark(self) -> None:
        """Write down, once, when it happens; the launch's clock and this one are the same."""
        if not self.planted:
            self.planted = True
            if not self._marks:
                return
            document = {"mono": time.monotonic(), "step": self.calls, "kind": self.kind}
            (self.run_dir / "planted.json").write_text(json.dumps(document), encoding="utf-8")


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _count_steps(planter: Planter, before: Callable[[Any], None] | None = None) -> None:
    """Count the steps, and call `before(engine)` at the start of the due ones' computing."""
    from nsa.train.engine import Engine

    def make(compute: Callable[..., Any]) -> Callable[..., Any]:
        def counted(engine: Any, *args: Any, **options: Any) -> Any:
            planter.calls += 1
            if before is not None and planter.due():
                planter.mark()
                before(engine)
            return compute(engine, *args, **options)

        return counted

    _wrap(Engine, "compute", make)


def _at_step(act: Callable[[Any], None], *, every: bool = False) -> Callable[[Planter], None]:
    def install(planter: Planter) -> None:
        def before(engine: Any) -> None:
            if every or planter.calls == planter.step:
                act(engine)

        _count_steps(planter, before)

    return install


# -- ends ------------------------------------------------------------------------------------------


def _end_by(number: int) -> Callable[[Any], None]:
    return lambda _engine: os.kill(os.getpid(), number)


def _raise(_engine: Any) -> None:
    raise ZeroDivisionError("planted")


def _segfault(_engine: Any) -> None:
    ctypes.string_at(0)


def _kill_parent(_engine: Any) -> None:
    _grandchild(_engine)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(_FOREVER_S)


def _kill_self_with_grandchild(_engine: Any) -> None:
    _grandchild(_engine)
    os.kill(os.getpid(), signal.SIGKILL)


def _grandchild(_engine: Any) -> None:
    """A process in a session of its own, which nobody's process group reaches."""
    subprocess.Popen(_GRANDCHILD, start_new_session=True, stdin=subprocess.DEVNULL)


# -- hangs -----------------------------------------------------------------------------------------


def _sleep(_engine: Any) -> None:
    time.sleep(_FOREVER_S)


def _spin(_engine: Any) -> None:
    while True:
        pass


def _sleep_in_backward(planter: Planter) -> None:
    def stuck(grad: Any) -> Any:
        time.sleep(_FOREVER_S)
        return grad

    _change_loss(planter, lambda loss: _in_backward(loss, stuck))


def _in_backward(loss: Any, act: Callable[[Any], Any]) -> Any:
    """A node of the graph that calls `act(gradient)` when the backward pass reaches it."""
    loss = loss * 1.0
    loss.register_hook(act)
    return loss


def _hang_in(module: str, name: str) -> Callable[[Planter], None]:
    """Sleep instead of calling a function of the trainer."""

    def install(planter: Planter) -> None:
        import importlib

        _count_steps(planter)

        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def stuck(*args: Any, **options: Any) -> Any:
                if planter.here:
                    planter.mark()
                    time.sleep(_FOREVER_S)
                return real(*args, **options)

            return stuck

        owner: Any = importlib.import_module(module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        _wrap(owner, last, make)

    return install


def _stall_data(planter: Planter) -> None:
    from nsa.data.generated import GeneratedSource

    _count_steps(planter)

    def make(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def slow(source: Any) -> Any:
            if planter.due():
                planter.mark()
                time.sleep(_FOREVER_S)
            return fetch(source)

        return slow

    _wrap(GeneratedSource, "fetch", make)


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


def _other_shape(planter: Planter) -> None:
    """One rank reduces one element fewer than the others."""
    import torch.distributed as dist

    _count_steps(planter)

    def make(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
        def smaller(tensor: Any, *args: Any, **options: Any) -> Any:
            if planter.due() and tensor.numel() > 1:
                planter.mark()
                tensor = tensor.flatten()[:-1].clone()
            return all_reduce(tensor, *args, **options)

        return smaller

    _wrap(dist, "all_reduce", make)


def _late(seconds: float) -> Callable[[Any], None]:
    return lambda _engine: time.sleep(seconds)


# -- numbers ---------------------------------------------------------------------------------------


def _change_loss(planter: Planter, change: Callable[[Any], Any], *, once: bool = True) -> None:
    from nsa.train.engine import Engine

    _count_steps(planter)

    def make(loss: Callable[..., Any]) -> Callable[..., Any]:
        def changed(engine: Any, *args: Any, **options: Any) -> Any:
            value = loss(engine, *args, **options)
            if not planter.due() or not value.requires_grad or (once and planter.planted):
                return value
            planter.mark()
            return change(value)

        return changed

    _wrap(Engine, "loss", make)


def _loss_as(change: Callable[[Any], Any], *, once: bool = True) -> Callable[[Planter], None]:
    return lambda planter: _change_loss(planter, change, once=once)


def _scaled_gradient(factor: float) -> Callable[[Any], Any]:
    return lambda loss: _in_backward(loss, lambda grad: grad * factor)


def _silence_gradients(engine: Any) -> None:
    for parameter in engine.model.parameters():
        parameter.register_hook(lambda grad: grad * 0.0)


def _collapse_gates(engine: Any) -> None:
    import torch

    for name, parameter in engine.model.named_parameters():
        if name.endswith("gate_bias"):
            with torch.no_grad():
                parameter.view(-1, 3).copy_(torch.tensor([-60.0, 60.0, -60.0]))


def _stick_the_clock(planter: Planter) -> None:
    from nsa.train.clock import Mark

    _count_steps(planter)

    def make(seconds: Callable[..., float]) -> Callable[..., float]:
        def stuck(mark: Any) -> float:
            if not planter.due():
                return seconds(mark)
            planter.mark()
            return 0.125

        return stuck

    _wrap(Mark, "seconds", make)


_hoard: list[bytearray] = []


def _leak(_engine: Any) -> None:
    _hoard.append(bytearray(b"x" * (24 << 20)))


# -- memory and disk -------------------------------------------------------------------------------


def _device_oom(_engine: Any) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")


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


def _small_files_at_checkpoint(planter: Planter) -> None:
    from nsa.train import checkpoint

    _count_steps(planter)

    def make(save: Callable[..., Any]) -> Callable[..., Any]:
        def limited(run_dir: Path, *args: Any, **options: Any) -> Any:
            if planter.due():
                planter.mark()
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
            return save(run_dir, *args, **options)

        return limited

    _wrap(checkpoint, "save", make)


def _tear_the_csv(tail: bytes) -> Callable[[Any], None]:
    def tear(_engine: Any) -> None:
        path = Path(os.environ["RUNBOOK_RUN_DIR"]) / "training.csv"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(handle, tail)
        os.kill(os.getpid(), signal.SIGKILL)

    return tear


# -- clocks and slow phases ------------------------------------------------------------------------


def _jump_clock(_engine: Any) -> None:
    real = time.time
    time.time = lambda: real() + _CLOCK_JUMP_S


def _jump_clock_and_sleep(engine: Any) -> None:
    _jump_clock(engine)
    time.sleep(_FOREVER_S)


def _slow_phases(planter: Planter) -> None:
    """A healthy run with a first step, an evaluation and a checkpoint longer than a step's budget.

    STEP is read as the seconds that each takes.
    """
    from nsa.train import checkpoint, loop

    seconds = float(planter.step)

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*args: Any, **options: Any) -> Any:
            if planter.here:
                time.sleep(seconds)
            return real(*args, **options)

        return slowly

    def first(_engine: Any) -> None:
        time.sleep(seconds)

    _wrap(checkpoint, "save", slow)
    _wrap(loop, "validation_loss", slow)
    planter.step = 1
    _at_step(first)(planter)


def _only_with(name: str, value: str, act: Callable[[Any], None]) -> Callable[[Planter], None]:
    """A fault that a toggle brings about: for the triage, which has to find the toggle."""

    def act_if(engine: Any) -> None:
        if os.environ.get(name) == value:
            act(engine)

    return _at_step(act_if)


def _nothing(planter: Planter) -> None:
    _count_steps(planter)


KINDS: dict[str, Callable[[Planter], None]] = {
    "none": _nothing,
    "exit": _at_step(lambda _engine: os._exit(7)),
    "kill": _at_step(_end_by(signal.SIGKILL)),
    "term": _at_step(_end_by(signal.SIGTERM)),
    "segv": _at_step(_segfault),
    "abort": _at_step(lambda _engine: os.abort()),
    "exception": _at_step(_raise),
    "kill_launcher": _at_step(_kill_parent),
    "kill_rank": _at_step(_kill_self_with_grandchild),
    "grandchild": _at_step(_grandchild),
    "sleep": _at_step(_sleep),
    "spin": _at_step(_spin),
    "sleep_backward": _sleep_in_backward,
    "stop": _at_step(_end_by(signal.SIGSTOP)),
    "hang_init": _hang_in("nsa.train.session", "Engine"),
    "hang_eval": _hang_in("nsa.train.loop", "validation_loss"),
    "hang_checkpoint": _hang_in("nsa.train.checkpoint", "save"),
    "hang_exit": _hang_in("nsa.train.session", "parameter_hash"),
    "data_stall": _stall_data,
    "extra_collective": _at_step(_extra_all_reduce),
    "other_op": _at_step(_other_op),
    "other_shape": _other_shape,
    "late_20ms": _at_step(_late(0.02), every=True),
    "late_100ms": _at_step(_late(0.1), every=True),
    "nan": _loss_as(lambda loss: loss * float("nan")),
    "inf": _loss_as(lambda loss: loss * float("inf")),
    "loss_spike": _loss_as(lambda loss: loss * 5.0),
    "exploding": _loss_as(_scaled_gradient(1e6)),
    "zero_gradients": _at_step(_silence_gradients),
    "gate_collapse": _at_step(_collapse_gates),
    "flatline": _stick_the_clock,
    "leak": _at_step(_leak, every=True),
    "device_oom": _at_step(_device_oom),
    "host_oom": _at_step(_host_oom),
    "csv_full": _at_step(_full_disk_for("training.csv")),
    "heartbeat_full": _at_step(_full_disk_for("heartbeat_rank*.jsonl")),
    "checkpoint_full": _small_files_at_checkpoint,
    "torn_csv": _at_step(_tear_the_csv(b"60,5.5,0.001,1")),
    "nul_csv": _at_step(_tear_the_csv(b"\0" * 512)),
    "clock_jump": _at_step(_jump_clock),
    "clock_jump_hang": _at_step(_jump_clock_and_sleep),
    "slow_phases": _slow_phases,
    "exit_with_static_graph": _only_with("NSA_DDP_STATIC_GRAPH", "1", lambda _engine: os._exit(7)),
    "hang_with_compression": _only_with("NSA_DDP_COMPRESS", "bf16", _sleep),
}


def main(argv: Sequence[str]) -> int:
    """Plant the fault, then run the trainer in this process. Returns its exit code."""
    from nsa.train.__main__ import main as train

    cut = argv.index("--")
    kind, rank, step = argv[:cut]
    planter = Planter(kind, int(rank), int(step))
    KINDS[kind](planter)
    return train(argv[cut + 1 :], os.environ)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
