"""A trainer that is not ours: how it is started, and where its numbers stand.

It keeps none of the trainer's contract, so that nothing here is believed of it but what a log line,
a process and this program's clock show.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from pydantic import Field, model_validator

from nsa.contract import SECRET_SHAPES, URL_LOGIN, is_secret_name
from runbook.records.measurement import Record

CONSOLE = "console"
OUT, STEPS, RANKS = "{out}", "{steps}", "{ranks}"
# What a column map may name: the first is needed, of the next three at most one is.
COLUMNS = ("loss", "dt_s", "dt_ms", "toks_per_s", "step", "lr", "grad_norm")
# How a trainer may tell its own pace, in one of these columns.
PACE = ("dt_s", "dt_ms", "toks_per_s")
_OURS = ("RUNBOOK_", "NSA_", "LD_")
_VARIABLE = re.compile(rf"(?!{'|'.join(_OURS)})[A-Za-z_]\w*")
# Its pace and ours differ by what happens between its steps, which it may leave out; a wrong unit,
# column or number of tokens differs by far more.
OWN_PACE_TOLERANCE = 0.1
# What no check can know of such a trainer; part of every verdict on it.
UNCHECKED = "its data, model, gradients, precision and settings were not checked"


class LogMap(Record):
    """Where the trainer writes a row for a step, and what its columns are called.

    `path` is a file below `{out}` (`*` and `**` stand for any names; .csv, .jsonl) or `console`.
    `columns` are our names (`COLUMNS`) and the trainer's. Console lines are dicts or JSON
    objects, unless `pattern` is a regular expression whose named groups are our columns. Without
    a column `step`, each row is `every` steps after the one before.
    """

    path: str = CONSOLE
    pattern: str = ""
    columns: dict[str, str] = Field(default_factory=dict)
    every: int = Field(default=1, ge=1)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of our columns that it names. Raises re.error for a pattern that is none."""
        return tuple(re.compile(self.pattern).groupindex if self.pattern else self.columns)

    @model_validator(mode="after")
    def _whole(self) -> LogMap:
        if self.path != CONSOLE and not self.path.startswith(f"{OUT}/"):
            raise ValueError(f"path {self.path!r}: it is {CONSOLE!r}, or begins with {OUT}/")
        if self.path != CONSOLE and not self.path.endswith((".csv", ".jsonl")):
            raise ValueError(f"path {self.path!r}: the file is a .csv or a .jsonl")
        if ".." in self.path.split("/"):
            raise ValueError(f"path {self.path!r}: it leaves the run directory")
        if self.pattern and (self.path != CONSOLE or self.columns):
            raise ValueError(f"pattern is for path {CONSOLE!r}, and takes the place of columns")
        try:
            known = self.names
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
        if odd := [name for name in known if name not in COLUMNS]:
            raise ValueError(f"columns: unknown {', '.join(odd)}; known are {', '.join(COLUMNS)}")
        if "loss" not in known:
            raise ValueError("columns: loss is missing; without it there is nothing to watch")
        if len(set(PACE) & set(known)) > 1:
            raise ValueError(f"columns: only one of {', '.join(sorted(PACE))}")
        return self


class HeartbeatMap(Record):
    """JSON lines that each rank writes as it goes: `path` has `{rank}`, `step` names the field."""

    path: str
    step: str = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> HeartbeatMap:
        if not self.path.startswith(f"{OUT}/") or "{rank}" not in self.path:
            raise ValueError(f"path {self.path!r}: it begins with {OUT}/ and holds {{rank}}")
        if ".." in self.path.split("/"):
            raise ValueError(f"path {self.path!r}: it leaves the run directory")
        return self


class OwnTrainer(Record):
    """A trainer of one's own, as a profile describes it.

    `command` is what a person types, with `{steps}`, `{ranks}` and `{out}`, a folder that is new
    in each launch; `single` the same for one process, where it is not the same command with one
    rank. Tokens of a step are `tokens_per_rank`, or `tokens_per_step` where the batch does not grow
    with the ranks. `ready` is a pattern of the line after which it trains. Nothing heard for
    `silence_s` seconds is a hang.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    command: str
    single: str = ""
    tokens_per_rank: int | None = Field(default=None, ge=1)
    tokens_per_step: int | None = Field(default=None, ge=1)
    env: dict[str, str] = Field(default_factory=dict)
    ready: str = ""
    silence_s: float = Field(default=180.0, gt=0)
    log: LogMap
    heartbeats: HeartbeatMap | None = None
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> OwnTrainer:
        for key, text in {"command": self.command, "single": self.single}.items():
            words = _words(key, text)
            if (words or key == "command") and STEPS not in text:
                raise ValueError(f"{key}: it holds no {STEPS}, which says how long it trains")
        if not self.single and RANKS not in self.command:
            raise ValueError(f"command: it holds no {RANKS}; name the command for one rank: single")
        if (self.tokens_per_rank is None) == (self.tokens_per_step is None):
            raise ValueError("one of tokens_per_rank and tokens_per_step is needed")
        if odd := sorted(name for name in self.env if not _VARIABLE.fullmatch(name)):
            raise ValueError(f"env: {', '.join(odd)} cannot be set; no {'*, '.join(_OURS)}*")
        if told := sorted(name for name in self.env if is_secret_name(name)):
            raise ValueError(
                f"env: {', '.join(told)} is a secret by its name, and a run records its profile; "
                "let the command read it from a file"
            )
        texts = {"command": self.command, "single": self.single, **self.env}
        shapes = (SECRET_SHAPES, URL_LOGIN)
        if told := [key for key, t in texts.items() if any(one.search(t) for one in shapes)]:
            raise ValueError(f"{', '.join(told)}: it holds a secret, and a run records its profile")
        try:
            re.compile(self.ready)
        except re.error as error:
            raise ValueError(f"ready is no regular expression: {error}") from error
        return self

    def argv(self, *, ranks: int, steps: int, alone: bool = False) -> tuple[str, ...]:
        """The words of the command; `{out}` is left for the launch, which knows its folder."""
        words = _words("command", self.single if alone and self.single else self.command)
        told = str(1 if alone else ranks)
        return tuple(word.replace(RANKS, told).replace(STEPS, str(steps)) for word in words)

    def tokens(self, ranks: int) -> int:
        """Tokens of one optimizer step of so many ranks."""
        return self.tokens_per_step or (self.tokens_per_rank or 0) * ranks


def for_own(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of a launch's variables that a trainer of one's own gets: it has no toggles."""
    return {name: text for name, text in variables.items() if not name.startswith("NSA_")}


def _words(key: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
