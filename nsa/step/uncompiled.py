"""torch's compiler left out of a process that compiles nothing.

torch loads it, a second of a processor on every rank, as soon as an optimizer or DDP asks for
`torch._dynamo`, only to say what a compiler must not look into. Here is what answers that. Whoever
asks for anything else gets the compiler itself. The names are those of torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from nsa.torch_env import for_good

_COMPILER = "torch._dynamo"


class _Instead(ModuleType):
    """Stands where the compiler, or a part of it, would; any name that it lacks loads that."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # only what looks at modules as such asks for these
        _load()
        return getattr(import_module(self.__name__), name)


class _Parts(MetaPathFinder):
    """Finds a module of the compiler that is imported by its name: first loads all of it."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib asks; None for whatever is not left out."""
        if not fullname.startswith(f"{_COMPILER}.") or not is_left_out():
            return None
        _load()
        return ModuleSpec(fullname, _Loaded(import_module(fullname)))


class _Loaded(Loader):
    """Loads nothing: the module is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        """The module that is there."""
        return self._module

    def exec_module(self, _module: ModuleType) -> None:
        """Nothing: it was."""


def is_left_out() -> bool:
    """Does something stand in the compiler's place?"""
    return isinstance(sys.modules.get(_COMPILER), _Instead)


def leave_out_compiler() -> None:
    """Until something is compiled; without effect where the compiler is loaded."""
    if _COMPILER in sys.modules:
        return
    known: dict[str, Any] = {
        "__path__": [],
        "disable": _disable,
        "graph_break": lambda: None,
        "utils": _Instead(f"{_COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        "trace_rules": _Instead(f"{_COMPILER}.trace_rules", clear_lru_cache=lambda: None),
    }
    sys.modules[_COMPILER] = _Instead(_COMPILER, **known)
    vars(torch)["_dynamo"] = sys.modules[_COMPILER]
    sys.meta_path.insert(0, _Parts())


def _load() -> None:
    """Put the compiler where it belongs."""
    if is_left_out():
        del sys.modules[_COMPILER], vars(torch)["_dynamo"]
        with for_good():
            import_module(_COMPILER)


def _disable(function: Callable[..., Any] | None = None, *args: Any, **how: Any) -> Any:
    """The function itself, which no compiler sees."""
    if function is not None:
        return function
    _load()
    return import_module(_COMPILER).disable(function, *args, **how)
