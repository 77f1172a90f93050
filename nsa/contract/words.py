"""Errors, what the log says, names of ranges, and what is a secret: words that both sides know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from nsa.contract.files import RUN_TOKEN_VARIABLE


class NSAError(ValueError):
    """A wrong value from the caller; the message names it, the allowed values and the remedy.

    `problems` has each reason by itself where the message lists several.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)

    @classmethod
    def listing(cls, where: str, problems: Sequence[str]) -> Self:
        """One error for all problems."""
        lines = "".join(f"\n  - {problem}" for problem in problems)
        return cls(f"{where}: {len(problems)} problem(s){lines}", problems)


def raise_problems(where: str, problems: Sequence[str]) -> None:
    """Raise one NSAError that lists every problem, or return if there is none."""
    if problems:
        raise NSAError.listing(where, problems)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def proof_text(evidence: Any) -> str:
    """The trainer's evidence as a reader wants it: `fused yes, state_entries 16`.

    >>> proof_text({"hook": "bf16", "fused": [True, True], "bytes_after": 2773392})
    'hook bf16, fused yes/yes, bytes_after 2773392'
    """
    if isinstance(evidence, Mapping):
        return ", ".join(f"{name} {proof_text(value)}" for name, value in evidence.items())
    if isinstance(evidence, list | tuple):
        return "/".join(proof_text(value) for value in evidence) or "none"
    if isinstance(evidence, bool):
        return "yes" if evidence else "no"
    return str(evidence)


# -- the log and the profiler ----------------------------------------------------------------------

# The start of the line that says which gradient compression DDP uses.
COMPRESSION_LINE = "[ddp] gradient compression enabled: "
# How the message begins that lists why a launch cannot start.
REFUSAL = "this launch cannot start"
# What a rank says of an end, or of a refused arm, that is not its own doing.
ELSEWHERE = "another rank"
# How the reason of an end, or of a refused arm, begins where memory ran out.
OUT_OF_MEMORY_PREFIX = "out of memory: "
# How a line of the console begins that one rank writes for itself.
RANK_LINE = re.compile(r"^\[rank\s?(\d+)\]")

# Names of the ranges that the profiler and NVTX see.
CMP_RANGE = "nsa.cmp"
SCORES_RANGE = "nsa.sel.scores"
SELECTION_RANGES = {"v1": "nsa.sel.ranges_v1", "v2": "nsa.sel.ranges_v2"}
ATTEND_RANGE = "nsa.sel.attend"
WIN_RANGE = "nsa.win"
GATE_RANGE = "nsa.gate"


# -- secrets ---------------------------------------------------------------------------------------

# Neither the trainer nor its harness writes one of these into an artifact.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|PRIVATE|AUTH|SIGNATURE|WEBHOOK|DSN$"
    r"|(?:^|_)(?:API[_-]?KEY|ACCESS_?KEY|KEY|PWD|PASS|PIN|SESSION|CERT)(?:$|_)|APIKEY",
    re.IGNORECASE,
)
# Names that match the pattern and are none: shell folders, and the run's own token.
_HARMLESS = frozenset({"PWD", "OLDPWD", RUN_TOKEN_VARIABLE, "XAUTHORITY"})
# Shapes that are secrets whatever the variable is called.
SECRET_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{20,}|glpat-[\w-]{8,}"
    r"|sk-[\w-]{8,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)
URL_LOGIN = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)[^/\s@'\"]+@")


# Variables by which git, started from a hook or `rebase --exec`, works in another repository than
# the folder that it is given.
GIT_PLACES = frozenset(
    {
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_DIR",
        "GIT_INDEX_FILE",
        "GIT_NAMESPACE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_WORK_TREE",
    }
)


def is_secret_name(name: str) -> bool:
    """True if a variable or an option of this name is likely to hold a secret."""
    return name not in _HARMLESS and _SECRET_NAME.search(name) is not None
