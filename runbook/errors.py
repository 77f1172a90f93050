"""Errors meant for people: one message that holds everything wrong, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from unicodedata import category


class ProgramExit(IntEnum):
    """Every exit code of this program.

    `runbook run` means the verdict by them, 2 apart. For other commands the first four are good,
    bad, wrong usage and undecided; PARTIAL is good as far as it was asked for.
    """

    GO = 0
    NO_GO = 1
    USAGE = 2
    INCOMPLETE = 3
    PARTIAL = 4
    DEFECT = 70
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class RunbookError(ValueError):
    """Something the user can fix; the command line prints it and exits with 2."""

    @property
    def lines(self) -> tuple[str, ...]:
        """What is printed: a line, and one of its own for each of several problems."""
        return (str(self),)


class UsageError(RunbookError):
    """Bad input. Holds every problem found, so that one run shows them all."""

    def __init__(self, problems: str | Sequence[str], *, hint: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.hint = hint
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """The only problem, or all under their number; the hint stands behind the last one."""
        if len(self.problems) == 1:
            listed = list(self.problems)
        else:
            listed = [f"{len(self.problems)} problems:", *(f"  - {one}" for one in self.problems)]
        return (*listed[:-1], f"{listed[-1]}; {self.hint}" if self.hint else listed[-1])


_MOST_SHOWN = 60


def shown(value: object) -> str:
    """A wrong value as a message repeats it; of a very long one the beginning."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def not_one_line(text: str) -> str:
    """Why a value that is printed again cannot be taken; empty if it is one printable line."""
    if any(category(char) in ("Cc", "Zl", "Zp") for char in text):
        return f"must be without line breaks and control characters, not {shown(text)}"
    return ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean X?)"` for the nearest known name, or an empty string."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return meant(near)


_MOST_MEANT = 5


def meant(names: Sequence[str]) -> str:
    """`" (did you mean X, Y or Z?)"` for the first five of these names, or an empty string."""
    *others, last = map(repr, names[:_MOST_MEANT] or [""])
    said = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {said}?)" if names else ""


def choice_for(name: str, known: Iterable[str]) -> str:
    """What to type for an unknown name: the nearest one or, where none is near, all of them."""
    names = list(known)
    return did_you_mean(name, names) or f"; there are: {', '.join(names)}"


# What stops or starts something is never proposed to somebody who typed another word.
_ACTING = frozenset({"--halt", "--without-go"})
# How alike two names have to be; in one of at most so many letters, two of them may be wrong.
_ALIKE, _ALIKE_SHORT, _SHORT = 0.8, 0.66, 5


def option_meant(flag: str, known: Iterable[str]) -> str:
    """`" (did you mean --x?)"` for an option that is a slip away, or an empty string."""
    import difflib

    name = flag.lstrip("-")
    words = [one[2:] for one in known if one.startswith("--") and one not in _ACTING]
    cutoff = _ALIKE if len(name) > _SHORT else _ALIKE_SHORT
    near = difflib.get_close_matches(name, words, n=1, cutoff=cutoff)
    return meant([f"--{one}" for one in near])
