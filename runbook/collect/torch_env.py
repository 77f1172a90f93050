"""What torch says of itself, asked in a process of its own: this program never imports torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runbook.collect._tools import run_tool

__all__ = ["TorchFacts", "ask_torch"]

_TIMEOUT_S = 180.0
_MARK = "@@runbook@@"

# Two answers, the second one flushed separately: a trainer that kills the interpreter while it
# is imported must not take torch's own description with it.
_SCRIPT = """
import importlib, json, sys
def say(**answer):
    print(MARK + json.dumps(answer), flush=True)
try:
    import torch
    from torch.utils.collect_env import get_pretty_env_info
    say(version=torch.__version__, cuda_available=torch.cuda.is_available(),
        device_count=torch.cuda.device_count(), cuda=torch.version.cuda,
        collect_env=get_pretty_env_info())
except Exception as error:
    say(torch_error=f"{type(error).__name__}: {error}")
try:
    importlib.import_module(TRAINER)
    say(trainer=True)
except Exception as error:
    say(trainer=False, trainer_error=f"{type(error).__name__}: {error}")
"""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The answers; None and a `problem` where torch could not be asked."""

    version: str | None
    cuda_available: bool | None
    device_count: int | None
    collect_env: str
    trainer_imports: bool
    trainer_error: str
    problem: str


def ask_torch(*, trainer: str = "nsa.train", cwd: Path | None = None) -> TorchFacts:
    """Describe torch as `python -m torch.utils.collect_env` does, and import the trainer."""
    script = f"MARK = {_MARK!r}\nTRAINER = {trainer!r}\n{_SCRIPT}"
    # -P: the current folder must not be able to stand in for a package.
    result = run_tool([sys.executable, "-P", "-c", script], timeout_s=_TIMEOUT_S, cwd=cwd)
    answer: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        if line.startswith(_MARK):
            answer.update(json.loads(line.removeprefix(_MARK)))
    problem = str(answer.get("torch_error", ""))
    if "version" not in answer and not problem:
        problem = result.problem or "torch gave no answer"
    return TorchFacts(
        version=answer.get("version"),
        cuda_available=answer.get("cuda_available"),
        device_count=answer.get("device_count"),
        collect_env=str(answer.get("collect_env", "")),
        trainer_imports=bool(answer.get("trainer", False)),
        trainer_error=str(answer.get("trainer_error") or "")
        or ("" if answer.get("trainer") else result.problem or "no answer"),
        problem=problem,
    )
