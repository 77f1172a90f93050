"""Which runs are kept: what is special in each, the exact commands, and how each command ends.

Of `go` and `launch` the paths of other people's processes were replaced by some of the same length,
and every digest that follows from them with it. None is of a GPU: only reports of such runs are
left, no folder of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """One run. `commands` are typed in an empty folder; each ends with its code of `exits`.

    `profile` is what is written there as `mine.yaml`, which extends `cpu`. `beside` names the entry
    in whose folder it is made, after it. The first command is killed as soon as its run has the
    file `killed_at`. `cluster`: Slurm runs meanwhile. In a command, `{run}` is the run that the
    command before it made, `{plain}` a trainer that is not ours.
    """

    name: str
    what: str
    commands: tuple[str, ...]
    exits: tuple[int, ...]
    profile: dict[str, Any] = field(default_factory=dict)
    beside: str = ""
    killed_at: str = ""
    cluster: bool = False


FROZEN = tuple(
    Frozen(**one)
    for one in yaml.safe_load(Path(__file__).with_name("catalog.yaml").read_text("utf-8"))
)
