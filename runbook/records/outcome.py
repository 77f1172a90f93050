"""One row of the acceptance table; what it can say and why, and what a run can say."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from pydantic import Field, model_validator

from runbook.errors import ProgramExit
from runbook.records.measurement import Measurement, Record, Scalar, unsaid

# Between the steps of a remedy.
STEP = "; "
# What a check or a launch follows from that is not there because the run was stopped.
THE_RUN = "run"


class Outcome(StrEnum):
    """What one check says.

    INCONCLUSIVE: measured, not decidable at the declared error rate.  INVALID: not comparable,
    not plausible, or the environment is wrong.  INCOMPLETE: no evidence (not run, cut off).
    """

    # The worst first: a fault outranks a wrong comparison, which outranks missing evidence. SKIPPED
    # stands before PASS: of launches that answer one question, the one that did not must be seen.
    FAIL = "FAIL"
    INVALID = "INVALID"
    INCOMPLETE = "INCOMPLETE"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIPPED = "SKIPPED"
    PASS = "PASS"  # noqa: S105 - a verdict, not a password

    @property
    def rank(self) -> int:
        """The place in the one order of severity: 0 is the worst."""
        return list(Outcome).index(self)


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


class Answered(Protocol):
    """A check, or what will become one."""

    @property
    def outcome(self) -> Outcome: ...

    @property
    def code(self) -> Reason: ...


def satisfies(check: Answered) -> bool:
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
