"""What a launch says when nothing of it could start: its config, or the machine, is wrong.

Neither is a fault of the trainer, so the words are kept as they are: they are the one cause of
every row of the launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nsa.contract import RANK_LINE, REFUSAL

# What torch, CUDA, the loader and torchrun's rendezvous say of a machine that cannot run them.
_MACHINE = re.compile(
    r"TCPStore backend does not support|built without libuv support"
    r"|Rendezvous(Connection|Timeout|Closed|State)Error"
    r"|server socket has failed to listen"
    r"|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device"
    r"|Torch not compiled with CUDA enabled|CUDA driver version is insufficient"
    r"|NVIDIA driver on your system is too old|no kernel image is available"
    r"|invalid device ordinal|system not yet initialized"
    r"|error while loading shared libraries|No module named '?torch\b"
)
_TORCHRUN = re.compile(r"torch[./]distributed[./]elastic|ChildFailedError|failed \(exitcode")


def one_line(text: str) -> str:
    """A message of several lines as one."""
    return " ".join(text.split())


def said_by_machine(lines: Iterable[str]) -> str:
    """The first of these lines in which the machine refuses to run a trainer; empty if none."""
    for line in lines:
        if _MACHINE.search(line):
            return one_line(_own(line))[:500]
    return ""


def said_by_trainer(console: Sequence[str]) -> str:
    """Why the trainer refused to start, from its console: its list of problems; empty if none."""
    for start, line in enumerate(console):
        if REFUSAL in line:
            words = [_own(line)]
            for more in console[start + 1 :]:
                if not more.startswith("  - "):
                    break
                words.append(more)
            return one_line(" ".join(words))[:2000]
    return ""


def last_words(console: Sequence[str]) -> str:
    """The last line that is not torchrun's: all there is of a trainer that refuses wordlessly."""
    ours: list[str] = []
    for line in console:
        if _TORCHRUN.search(line) or line.startswith("Traceback"):
            break
        ours.append(line)
    return next((one_line(_own(line))[:500] for line in reversed(ours) if line.strip()), "")


def _own(line: str) -> str:
    return RANK_LINE.sub("", line, count=1).lstrip(": ")
