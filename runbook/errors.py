"""What people are told: one error that holds everything wrong, and words as one safe line."""

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
    UNREAD = 141
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

    return meant(difflib.get_close_matches(name, list(known), n=1))


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


# A caveat that lists settings begins small: FLAKY and REPEATED name launches and phases.
_LISTING = re.compile(r"([a-z][a-z ]*) \((.*)\)", re.DOTALL)
_LISTED = 3


# What a terminal is told of colors.
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def without_colors(text: str) -> str:
    """What a program printed, as it would have for no terminal."""
    return _COLOR.sub("", text)


# A command of this program in a sentence: between backticks, or behind these words.
_COMMAND = re.compile(r"(?:(?<=`)|(?<=\bsee )|(?<=: ))runbook (?=[a-z-])")


# The program at the beginning of a command, behind the variables that are to be left out.
_CALLED = re.compile(r"(env (?:-u \S+ )*)?runbook ")


def called_by(line: str, program: str) -> str:
    """A command as its reader types it, who types `program` for `runbook`."""
    found = _CALLED.match(line)
    return f"{found[1] or ''}{program} {line[found.end() :]}" if found else line


def with_program(text: str, program: str) -> str:
    """A sentence whose commands begin with what its reader types for `runbook`."""
    return _COMMAND.sub(lambda _: f"{program} ", text)


def verdict_text(verdict: str, caveats: Iterable[str]) -> str:
    """The verdict with what it leaves out: `GO for 1 of 61 checks, fewer steps (13 settings)`."""
    whole = " " not in verdict  # of a PARTIAL PASS the counts stand behind the word
    texts = (_clause(short_caveat(caveat), whole=whole) for caveat in caveats)
    return f"{verdict}{''.join(texts)}"


# What the caveat says that is a sentence.
OF_ONES_OWN = " is a trainer of your own"


def _clause(caveat: str, *, whole: bool) -> str:
    """A caveat as it goes on behind a verdict."""
    if OF_ONES_OWN in caveat:
        return f": {caveat}"
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


def how_many(count: int, noun: str, nouns: str = "") -> str:
    """`1 phase`, `2 phases`; with another plural `3 launches`."""
    return f"{count} {noun if count == 1 else nouns or f'{noun}s'}"


def listed(texts: Sequence[object], most: int = 3, *, between: str = ", ") -> str:
    """`a, b, c and 2 more`: of what a thousand ranks may tell the first ones, and a count."""
    more = len(texts) - most
    return between.join(map(str, texts[:most])) + (f" and {more} more" if more > 0 else "")


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
