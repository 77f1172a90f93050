"""The real trainer with one injected fault: `-m nsa.inject KIND RANK STEP -- ARGUMENTS`.

Runs inside a rank. It wraps functions of the trainer, waits for its rank and step, notes the time
in `injected.json`, and then does the real thing: a real signal, a real full disk, a real NaN. The
trainer itself knows nothing of it. torch is imported in here only where a fault needs it.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa.contract import INJECTED_JSON, RUN_DIR_VARIABLE

FOREVER_S = 3600.0
EVERY_RANK = -1

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


def instead(module: str, name: str, act: Callable[..., Any], *, at_once: bool = False) -> Install:
    """Call `act(function, its arguments)` in the place of a function of the trainer once due.

    at_once: on the rank's first call already, whatever the step.
    """

    def install(injector: Injector) -> None:
        count_steps(injector)

        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*args: Any, **options: Any) -> Any:
                if not (injector.here if at_once else injector.due()):
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
    """Give `change(loss)` to the backward pass, once."""

    def install(injector: Injector) -> None:
        from nsa.step.engine import Engine

        count_steps(injector)

        def make(loss: Callable[..., Any]) -> Callable[..., Any]:
            def changed(engine: Any, *args: Any, **options: Any) -> Any:
                value = loss(engine, *args, **options)
                if not injector.due() or not value.requires_grad or injector.injected:
                    return value
                injector.mark()
                return change(value)

            return changed

        wrap(Engine, "loss", make)

    return install


def only_with(name: str, value: str, act: Callable[[Any], None]) -> Install:
    """A fault that a toggle brings about: for the triage, which has to find the toggle."""

    def act_if(engine: Any) -> None:
        if os.environ.get(name) == value:
            act(engine)

    return at_step(act_if)


# -- ends ------------------------------------------------------------------------------------------


# -- hangs -----------------------------------------------------------------------------------------


# -- collectives -----------------------------------------------------------------------------------


# -- clocks and slow phases ------------------------------------------------------------------------


# -- numbers ---------------------------------------------------------------------------------------


# -- memory and disk -------------------------------------------------------------------------------
