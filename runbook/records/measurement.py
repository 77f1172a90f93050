"""What a phase shows: numbers with everything needed to believe them, curves, tables and checks.

And what a check can say and why, and what a run can say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json, to_json

from runbook.errors import ProgramExit

# The one spelling of throughput in everything that is shown; the CSV column is `toks_per_s`.
TOKENS_PER_SECOND = "tok/s"
MIB_PER_GIB = 1024.0

# Between the steps of a remedy.
STEP = "; "
# What a check or a launch follows from that is not there because the run was stopped.
THE_RUN = "run"

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _number_of_word(value: object) -> object:
    """JSON has no NaN: it is stored as a word, and must come back as the number it was."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


Scalar = Annotated[float | str | bool, BeforeValidator(_number_of_word)]
Cell = Annotated[str | float | int | None, BeforeValidator(_number_of_word)]


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def plain_number(value: float | int | str | bool | None) -> str:
    """A value as text: four significant digits, whole from 10,000 on, yes/no, NaN, - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return _word(value)
    return f"{value:.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"


def json_ready(value: Any) -> Any:
    """The same document with NaN and infinities as words: JSON has no numbers for them."""
    return from_json(to_json(value, inf_nan_mode="strings"))


class Record(BaseModel):
    """An immutable record; an unknown field is an error, so a schema cannot drift unseen."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings"
    )


def unsaid(default: Any, **bounds: Any) -> Any:
    """A field that a document leaves out where it has its default, so that old ones stay equal."""
    return Field(default=default, exclude_if=lambda value: bool(value == default), **bounds)


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with a document, and where."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def duration_text(seconds: float) -> str:
    """`2.25 s`, `41 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Window(Record):
    """The steps that a number was taken from, first and last included."""

    first_step: int = Field(ge=0)
    last_step: int = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Window:
        if self.last_step < self.first_step:
            raise ValueError(f"window ends ({self.last_step}) before it begins ({self.first_step})")
        return self

    def __str__(self) -> str:
        return f"steps {self.first_step}-{self.last_step}"


class Source(Record):
    """A file that a number was taken from, with its digest when it was read."""

    path: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    window: Window | None


class Measurement(Record):
    """One measured value: it cannot exist without unit, sample size, window, source and digest.

    `path` is relative to the run's folder; `sha256` is the digest of that file when it was read.
    `window` is None only for values that are no statistic over steps (a count, a version). A
    number that rests on several files names the first there and the rest in `others`.
    """

    name: str = Field(min_length=1)
    value: Scalar
    unit: str
    n: int = Field(ge=1)
    window: Window | None
    path: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    stdev: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""
    others: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every file that the number rests on."""
        return (Source(path=self.path, sha256=self.sha256, window=self.window), *self.others)

    @property
    def named(self) -> tuple[tuple[str, ...], int]:
        """The files to name where there is little room, and how many more there are.

        Of more than three, the first alone.
        """
        paths = tuple(source.path for source in self.sources)
        return (paths, 0) if len(paths) <= 3 else (paths[:1], len(paths) - 1)

    @property
    def where(self) -> str:
        """The files as text."""
        paths, more = self.named
        return ", ".join(paths) + (f" and {more} more" if more else "")

    def __str__(self) -> str:
        spread = f" +- {plain_number(self.stdev)}" if self.stdev is not None else ""
        unit = f" {self.unit}" if self.unit else ""
        window = f", {self.window}" if self.window else ""
        return f"{plain_number(self.value)}{spread}{unit} (n={self.n}{window}, {self.where})"


MAX_POINTS = 400


class Mark(Record):
    """A labelled level, such as a limit, to hold values against."""

    label: str = Field(min_length=1)
    value: float


class Series(Record):
    """Points (x, y) of one curve. It illustrates; no check is ever judged from it.

    `path` and `sha256` name the artifact that holds every point. Curves of one `group` are drawn
    to one scale, each under its `label`. The steps of `warmup` count in no statistic; `window` are
    those of the last-50 statistic.
    """

    name: str = Field(min_length=1)
    x_label: str = "step"
    unit: str
    points: tuple[tuple[float, float], ...] = Field(min_length=1, max_length=MAX_POINTS)
    n: int = Field(ge=1)
    group: str = ""
    label: str = ""
    warmup: Window | None = None
    window: Window | None = None
    limits: tuple[Mark, ...] = ()
    path: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def thin_points(
    xs: Sequence[float], ys: Sequence[float], *, keep: int
) -> tuple[tuple[float, float], ...]:
    """At most `keep` of the points, in order: the lowest and highest of each stretch survive.

    Dips and peaks are what a reader looks for, so a plain stride would hide them.
    """
    points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
    if len(points) <= keep:
        return tuple(points)
    stretches = keep // 2
    edges = [round(index * len(points) / stretches) for index in range(stretches + 1)]
    kept: set[int] = set()
    for start, stop in pairwise(edges):
        indices = range(start, stop)
        kept.add(min(indices, key=lambda index: points[index][1]))
        kept.add(max(indices, key=lambda index: points[index][1]))
    return tuple(points[index] for index in sorted(kept))


class Table(Record):
    """A table of a phase, such as bucket size against last-50-step mean and stdev."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


class Outcome(StrEnum):
    """What one check says.

    INCONCLUSIVE: measured, not decidable at the declared error rate.  INVALID: not comparable,
    not plausible, or the environment is wrong.  INCOMPLETE: no evidence (not run, cut off).
    """

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    INCOMPLETE = "INCOMPLETE"
    SKIPPED = "SKIPPED"

    @property
    def rank(self) -> int:
        """The place in the one order of severity: 0 is the worst."""
        return WORST_FIRST.index(self)


# A fault outranks a wrong comparison, which outranks missing evidence. SKIPPED stands before PASS:
# of several launches that answer one question, the one that did not must be seen.
WORST_FIRST = (
    Outcome.FAIL,
    Outcome.INVALID,
    Outcome.INCOMPLETE,
    Outcome.INCONCLUSIVE,
    Outcome.SKIPPED,
    Outcome.PASS,
)


class Reason(StrEnum):
    """Why a check says what it says; a number that is missing always has one of these."""

    OK = "ok"
    BELOW_LIMIT = "below_limit"
    ABOVE_LIMIT = "above_limit"
    MISMATCH = "mismatch"
    UNBALANCED = "unbalanced"
    NOT_LEARNING = "not_learning"
    UNDECIDED = "undecided"
    TOO_FEW_SAMPLES = "too_few_samples"
    NOT_COMPARABLE = "not_comparable"
    NOT_PLAUSIBLE = "not_plausible"
    NO_EFFECT = "no_effect"
    WRONG_ENVIRONMENT = "wrong_environment"
    DAMAGED_ARTIFACT = "damaged_artifact"
    MISSING_ARTIFACT = "missing_artifact"
    CRASH = "crash"
    HANG = "hang"
    TIMEOUT = "timeout"
    NON_FINITE = "non_finite"
    OUT_OF_MEMORY = "out_of_memory"
    LEAK = "leak"
    HALTED = "halted"
    FLAKY = "flaky"
    NOT_RUN = "not_run"
    INTERRUPTED = "interrupted"
    HARNESS_ERROR = "harness_error"
    NEEDS_CUDA = "needs_cuda"
    NEEDS_GPUS = "needs_gpus"
    NEEDS_CONTRACT = "needs_contract"
    NOT_ASKED_FOR = "not_asked_for"
    NOT_GATED = "not_gated"
    NO_ACCEPTED_RUN = "no_accepted_run"
    NOTHING_COLLECTED = "nothing_collected"
    TEST_FAILED = "test_failed"
    WARNING = "warning"


class Verdict(StrEnum):
    """What one run says; the command's exit code follows from it.

    PARTIAL: every required check that was asked for passed, and others were not asked for.
    """

    GO = "GO"
    NO_GO = "NO-GO"
    PARTIAL = "PARTIAL PASS"
    INCOMPLETE = "INCOMPLETE"

    @property
    def exit_code(self) -> int:
        """The code of the same name."""
        return ProgramExit[self.name]


class Confidence(StrEnum):
    """What speaks against a node that a check or the end of a launch names.

    CONFIRMED: measured on the node itself, or with and without it.  REPORTED: one source says so,
    such as its facts, its kernel or its silence.  SUSPECTED: it is late in every step, which code
    or load can cause as well.
    """

    NONE = ""
    CONFIRMED = "confirmed"
    REPORTED = "reported"
    SUSPECTED = "suspected"


class Comparator(StrEnum):
    """How the value is held against the limit."""

    AT_LEAST = ">="
    ABOVE = ">"
    AT_MOST = "<="
    BELOW = "<"
    EQUALS = "=="
    IS_TRUE = "is true"
    NONE = ""


class Check(Record):
    """A question, what was measured, the limit with its source, and what follows.

    An outcome other than PASS or SKIPPED must name a remedy; only a measured value can PASS
    against a numeric limit.

    `follows` names what this outcome only follows from: a launch as `phase/launch`, another check
    by its id, a phase that did not run, `THE_RUN` for the run itself, or in words what the machine
    does not have. It is empty where the check stands for a fault of its own.

    `title` says in one short sentence what failed, where the judge has one; `reason` has every
    number. `clue` says what the evidence shows of the cause. `first_command` is what the remedy
    has typed before anything else: a program that shows the machine, or the phase again with a
    setting that tells more; empty where it has none.

    `nodes` are those of a cluster that it holds to be at fault, with what speaks against them.
    `choice` is what a comparison that could be decided says (`TIE`), which as an outcome is PASS.
    """

    id: str = Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_.]+$")
    phase: str
    question: str
    measurement: Measurement | None = None
    comparator: Comparator = Comparator.NONE
    limit: Scalar | None = None
    limit_source: str = ""
    outcome: Outcome
    code: Reason
    reason: str = Field(min_length=1)
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    rerun: str = ""
    required: bool = False
    follows: str = ""
    title: str = ""
    clue: str = ""
    first_command: str = ""
    nodes: tuple[str, ...] = unsaid(())
    confidence: Confidence = unsaid(Confidence.NONE)
    choice: str = unsaid("")

    @property
    def left_out(self) -> bool:
        """True if its phase was not asked for: no answer, and nothing that went wrong."""
        nothing = (self.outcome, self.code) == (Outcome.SKIPPED, Reason.NOT_ASKED_FOR)
        return nothing and self.follows == self.phase

    @property
    def blocks(self) -> bool:
        """True if it keeps the run from GO."""
        return self.required and not satisfies(self) and not self.left_out

    @property
    def is_problem(self) -> bool:
        """True if a reader has something to do: all but passes and skips that block nothing."""
        return self.blocks or self.outcome not in (Outcome.PASS, Outcome.SKIPPED)

    @model_validator(mode="after")
    def _honest(self) -> Check:
        if not self.id.startswith(f"{self.phase}."):
            raise ValueError(f"check {self.id!r} does not begin with its phase {self.phase!r}")
        if self.outcome is Outcome.PASS and self.limit is not None and self.measurement is None:
            raise ValueError(f"check {self.id!r} cannot pass a limit without a measurement")
        if self.limit is not None and not self.limit_source:
            raise ValueError(f"check {self.id!r} has a limit without its source")
        if self.outcome not in (Outcome.PASS, Outcome.SKIPPED) and not self.remedy:
            raise ValueError(f"check {self.id!r} is {self.outcome} without saying what to do")
        return self


def satisfies(check: Check) -> bool:
    """Does the check give what a profile requires?

    PASS does. So does SKIPPED for want of an accepted run to compare with, which the first run on
    a machine cannot have: what such a check forbids is a loss that is shown.
    """
    if check.outcome is Outcome.SKIPPED:
        return check.code is Reason.NO_ACCEPTED_RUN
    return check.outcome is Outcome.PASS


def judge_run(checks: Iterable[Check], required: Iterable[str]) -> Verdict:
    """Return the run's verdict from its checks and the ids that the profile requires.

    GO only if every required check is there and satisfied (`satisfies`); NO-GO if any required
    check is FAIL. Checks of phases that were not asked for count for neither: where all others are
    satisfied it is PARTIAL. Otherwise INCOMPLETE. A required id without a row can therefore never
    be GO. An id that occurs twice counts with each of its outcomes.
    """
    outcomes: dict[str, set[Outcome]] = {}
    left_out: set[str] = set()
    for check in checks:
        if check.left_out:
            left_out.add(check.id)
        else:
            outcome = Outcome.PASS if satisfies(check) else check.outcome
            outcomes.setdefault(check.id, set()).add(outcome)
    required = set(required)
    wanted = required - (left_out - outcomes.keys())
    if any(Outcome.FAIL in outcomes.get(name, set()) for name in wanted):
        return Verdict.NO_GO
    if not wanted or any(outcomes.get(name) != {Outcome.PASS} for name in wanted):
        return Verdict.INCOMPLETE
    return Verdict.GO if wanted == required else Verdict.PARTIAL
