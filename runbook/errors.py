"""Errors meant for people, and words of a run as one safe line.

An error is one message that holds everything wrong, and what to do. In a line control characters
are spelled out, and long caveats are counted.
"""

from __future__ import annotations

import re
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


def first_of(found: Sequence[str]) -> str:
    """The first of some, and how many more there are."""
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"


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
    return f" (did you mean '--{near[0]}'?)" if near else ""


# A caveat that lists settings begins small: FLAKY and REPEATED name launches and phases.
_LISTING = re.compile(r"([a-z][a-z ]*) \((.*)\)", re.DOTALL)
_LISTED = 3


def verdict_text(verdict: str, caveats: Iterable[str]) -> str:
    """The verdict with what it leaves out: `GO for 1 of 61 checks, fewer steps (13 settings)`."""
    whole = " " not in verdict  # of a PARTIAL PASS the counts stand behind the word
    texts = (_clause(short_caveat(caveat), whole=whole) for caveat in caveats)
    return f"{verdict}{''.join(texts)}"


def _clause(caveat: str, *, whole: bool) -> str:
    """A caveat as it goes on behind a verdict."""
    if not caveat.startswith("for "):
        return f", {caveat}"
    return f" {caveat}" if whole else f", {caveat.removeprefix('for ')} required"


def counted(caveat: str) -> tuple[str, str] | None:
    """What a caveat says and its list, where that is too long for a headline; else None."""
    found = _LISTING.fullmatch(caveat)
    long = found is not None and found[2].count(", ") >= _LISTED
    return (found[1], found[2]) if found and long else None


def short_caveat(caveat: str) -> str:
    """The caveat as a headline has it: a long list of settings is counted."""
    long = counted(caveat)
    if long is None:
        return caveat
    what, listed = long
    return (
        f"{what} ({listed.count(', ') + 1} {'limits' if what.startswith('limits') else 'settings'})"
    )


def printable(text: str) -> str:
    """The text with control characters spelled out, so that a log line cannot drive a terminal.

    Newlines, tabs and every kind of blank stay; characters that are invisible or that reverse the
    reading direction do not.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line if line.isprintable() else _printable(line) for line in lines)


def _printable(line: str) -> str:
    return "".join(
        char if char.isprintable() or char == "\t" or category(char) == "Zs" else _spelled(char)
        for char in line
    )


def in_one_line(text: str) -> str:
    """The printable text, line breaks spelled out too: one would look like another row."""
    return printable(text).replace("\n", "\\n")


def _spelled(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
