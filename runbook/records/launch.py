"""What is going to be started, and how it ended."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from nsa.contract import CONFIG_VARIABLE, HALT_FILE, ExitCode
from runbook.errors import how_many
from runbook.records.measurement import Record, unsaid
from runbook.records.own_trainer import OwnTrainer

CONFIG_FLAG = "--config"
RESUME_FLAG = "--resume"
DATASET_FLAG = "--dataset"
PROFILE_FLAG = "--profile-steps"
TORCHRUN = "torchrun"


def torchrun(ranks: int, *, nodes: int = 1) -> tuple[str, ...]:
    """The words with which a person starts so many ranks on each of the nodes."""
    spread = (f"--nnodes={nodes}",) if nodes > 1 else ()
    return (TORCHRUN, *spread, f"--nproc_per_node={ranks}")


class ArmSchedule(Record):
    """Arms that take turns inside one launch: `rounds[b]` is the order of the arms in block b.

    `settings` holds the toggles of every arm; `warmup_steps` rows before each arm's `steps`
    measured ones are excluded from statistics.
    """

    settings: dict[str, dict[str, str]]
    rounds: tuple[tuple[str, ...], ...]
    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)

    @model_validator(mode="after")
    def _known(self) -> ArmSchedule:
        unknown = {arm for order in self.rounds for arm in order} - set(self.settings)
        if unknown:
            raise ValueError(f"rounds name arms without settings: {sorted(unknown)}")
        return self

    @property
    def total_steps(self) -> int:
        """Rows that the launch will write, warm-up included."""
        return sum(len(order) for order in self.rounds) * (self.steps + self.warmup_steps)

    def to_trainer_json(self, *, lines: bool = False) -> str:
        """The trainer's `--arms` document; with `lines`, each round begins a line of its own."""
        rounds = [
            ",".join(
                _compact(
                    {"block": index, "arm": arm, "steps": self.steps, "set": self.settings[arm]}
                )
                for arm in order
            )
            for index, order in enumerate(self.rounds)
        ]
        head = _compact({"schema_version": 1, "warmup_steps": self.warmup_steps})[:-1]
        new, between = ("\n", ",\n") if lines else ("", ",")
        return f'{head},"blocks":[{new}{between.join(rounds)}{new}]}}'

    def in_words(self) -> str:
        """`24 rounds of 25, 50, 100 in changing order; each 20 steps after 4 of warm-up`."""
        rounds = how_many(len(self.rounds), "round")
        order = " in changing order" if len(set(self.rounds)) > 1 else ""
        warmup = f" after {self.warmup_steps} of warm-up" if self.warmup_steps else ""
        return f"{rounds} of {', '.join(self.settings)}{order}; each {self.steps} steps{warmup}"


def _compact(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


class Stop(Record):
    """How a launch is ended before its last step, once every rank has done so many of its own.

    `by`: SIGTERM to its last rank alone, which has to take the others with it, or the file `.HALT`.
    """

    by: Literal["SIGTERM", ".HALT"]
    steps: int = Field(ge=1)

    @property
    def code(self) -> int:
        """What every rank has to end with."""
        return int(ExitCode.HALTED if self.by == HALT_FILE else ExitCode.PREEMPTED)


class Launch(Record):
    """One process tree to start. `argv` and `env` are exactly what a person would type.

    `kind`: the trainer, the measurement of the devices' ceilings, shipped tests, a trainer of one's
    own, which `own` describes, or what collects facts on other machines. `run_dir` is relative to
    the run's folder. `nproc` are the ranks of all `nodes` together; `on` says which of the run's
    nodes, if not the first ones. `optional` launches decide their own arm only; `conditional` ones
    start only if their phase needs them (`Phase.needs_more`). `commit`: the launch runs from a
    clean checkout of it, with its packages. `resumes` names the launch of the same phase whose
    newest checkpoint it goes on from, after step `after`; `steps` counts from the very first one.
    `after` 0: from wherever that one ended. `watched`: detectors read its numbers while it runs,
    and halt it. `stop`: the launcher ends it, and that is its good end.
    """

    name: str = Field(pattern=r"^[a-z0-9_.-]+$")
    phase: str
    kind: str = Field(pattern=r"^(trainer|ceilings|pytest|own|collect)$")
    argv: tuple[str, ...]
    env: dict[str, str]
    run_dir: str
    nproc: int = Field(ge=1)
    nodes: int = unsaid(1, ge=1)
    on: tuple[int, ...] = unsaid(())
    steps: int = Field(ge=0)
    timeout_s: float = Field(gt=0)
    config: str = ""
    config_overrides: dict[str, str | int | float | bool] = Field(default_factory=dict)
    schedule: ArmSchedule | None = None
    optional: bool = False
    conditional: bool = False
    commit: str = Field(default="", pattern=r"^([0-9a-f]{40})?$")
    purpose: str = ""
    retry_steps: int | None = None
    resumes: str = unsaid("")
    after: int = unsaid(0, ge=0)
    watched: bool = unsaid(False)
    stop: Stop | None = unsaid(None)
    own: OwnTrainer | None = unsaid(None)

    @property
    def id(self) -> str:
        """`phase/launch`, unique in a run."""
        return f"{self.phase}/{self.name}"

    @property
    def named_config(self) -> str:
        """The trainer config that the command names; empty if it names none."""
        return option(self.argv, CONFIG_FLAG) or self.env.get(CONFIG_VARIABLE) or self.config

    @property
    def has_ranks(self) -> bool:
        """True if every rank of it writes heartbeats, by which it is watched and its end told."""
        return self.kind in ("trainer", "ceilings")

    @property
    def voices(self) -> int:
        """How many signs of life are expected of it; 0 if nothing says that it lives."""
        if self.own is not None:
            return self.nproc if self.own.heartbeats else 1
        return self.nproc if self.has_ranks else 0

    def words(self, *, lines: bool = False) -> tuple[str, ...]:
        """The whole command: `argv`, and the config, its changed keys and the arms as options.

        With `lines`, each round of arms begins a line of its own.
        """
        words = list(self.argv)
        if self.config and CONFIG_VARIABLE not in self.env and not option(words, CONFIG_FLAG):
            words += [CONFIG_FLAG, self.config]
        for key, value in sorted(self.config_overrides.items()):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words += ["--set", f"{key}={text}"]
        if self.schedule is not None:
            words += ["--arms", self.schedule.to_trainer_json(lines=lines)]
        if self.resumes and not option(words, RESUME_FLAG):
            words += [RESUME_FLAG, f"{self.phase}/{self.resumes}"]
        return tuple(words)

    def command_line(self, *, lines: bool = False) -> str:
        """What can be pasted into a shell: one line, or with `lines` one for each round of arms."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*settings, shlex.join(self.words(lines=lines))])


def option(words: Sequence[str], flag: str) -> str:
    """The value of a flag, as `--flag value` or `--flag=value`; empty if it is not there."""
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def with_option(words: Sequence[str], flag: str, value: str) -> list[str]:
    """The words with a flag's value replaced, or added at the end."""
    changed = list(words)
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            changed[index + 1] = value
            return changed
        if word.startswith(f"{flag}="):
            changed[index] = f"{flag}={value}"
            return changed
    return [*changed, flag, value]


class LaunchStatus(StrEnum):
    """How a launch ended."""

    COMPLETED = "completed"
    CRASHED = "crashed"
    CONFIG_ERROR = "config_error"
    ENVIRONMENT_ERROR = "environment_error"
    HARDWARE_ERROR = "hardware_error"
    NON_FINITE = "non_finite"
    OUT_OF_MEMORY = "out_of_memory"
    HALTED = "halted"
    PREEMPTED = "preempted"
    HUNG = "hung"
    TIMED_OUT = "timed_out"
    SILENT = "silent"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not_run"

    @property
    def words(self) -> str:
        """As a person writes it: `out of memory`."""
        return self.value.replace("_", " ")


class Kind(StrEnum):
    """Which of several faults a status can stand for."""

    NONE = ""
    FROZEN = "frozen"
    DATA_STALL = "data_stall"
    DESYNC = "desync"
    HOST_MEMORY = "host_memory"
    DISK_FULL = "disk_full"
    AT_EXIT = "at_exit"
    PARTED = "parted"


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended, or why it has to be ended, in the terms of `LaunchResult`."""

    status: LaunchStatus
    cause: str = ""
    culprit_rank: int | None = None
    kind: Kind = Kind.NONE
    node: str = ""


class RankExit(Record):
    """One rank's end, from its last heartbeat and from its parent's wait.

    node: the one that it ran on; empty where there is only this machine.

    said_s: time between two of its steps by the rank's own clock. watched_s: time between their
    arrivals at the launcher, by the launcher's clock. wall_gap_s: how far the times of day that it
    writes are behind those at which its machine reads them. apart_s, cpu_apart_s: by so much its
    monotonic clock, and its processor time, go otherwise than the arrivals of its lines leave room
    for, 0 or less where they agree; of a rank on the launcher's own machine. late_rows: by file,
    how many steps it was behind the rank's heartbeats. away_s: of the launch's time before its
    first word and after its last, what is nobody's: the harness itself was stopped, or the launch
    waited in a queue.
    """

    rank: int = Field(ge=0)
    code: int | None
    signal: str | None = None
    reason: str = ""
    steps_done: int | None = None
    said_s: float | None = None
    watched_s: float | None = None
    wall_gap_s: float | None = None
    apart_s: float | None = unsaid(None)
    cpu_apart_s: float | None = unsaid(None)
    late_rows: dict[str, int] = Field(default_factory=dict)
    away_s: float = unsaid(0.0, ge=0)
    node: str = unsaid("")


class Begun(Record):
    """The checkpoint that a launch went on from: its path in the run's folder, step and digest.

    `refused`: what was wrong with the ones that come before it.
    """

    path: str
    step: int = Field(ge=0)
    sha256: str
    refused: tuple[str, ...] = ()


class Stopped(Record):
    """When a launch was told to end, as its plan has it.

    step: the latest that any rank had ended by then, as the launcher had read. mono: on this
    machine's monotonic clock, s; None where the ranks are on others.
    """

    step: int = Field(ge=0)
    mono: float | None = None


class LaunchResult(Record):
    """How a launch ended, and which rank is to blame if it ended badly.

    `steps` is what the attempt that counts was asked for: a retry may take fewer than the plan.
    `notes` are findings that did not end the launch, such as a rank that is always late. `follows`
    says why one was not started, in the terms of `Check.follows`. `begun`: the checkpoint that it
    was told to go on from. `stopped_at`: the innermost functions of its own in which the culprit
    of a hang was (`file.py:12 in name`), the innermost first. `stopped`: when it was told to end as
    planned; None where it was not, or not before it ended by itself. `node`: the one of a cluster
    that failed or was lost, or of a good end the one that was late in every step.
    """

    status: LaunchStatus
    kind: Kind = Kind.NONE
    follows: str = ""
    exit_code: int | None = None
    ranks: tuple[RankExit, ...] = ()
    started_at: str = ""
    duration_s: float = Field(default=0.0, ge=0)
    attempts: int = Field(default=1, ge=0)
    cause: str = ""
    culprit_rank: int | None = None
    evidence: tuple[str, ...] = ()
    run_token: str = ""
    steps: int | None = None
    notes: tuple[str, ...] = ()
    begun: Begun | None = None
    stopped_at: tuple[str, ...] = ()
    stopped: Stopped | None = None
    node: str = unsaid("")

    @property
    def ok(self) -> bool:
        """True if the launch finished, or ended as it was told to."""
        return self.status is LaunchStatus.COMPLETED

    @property
    def steps_done(self) -> int:
        """Steps of the rank that did most, as far as any told of them."""
        return max((rank.steps_done or 0 for rank in self.ranks), default=0)

    @property
    def could_not_start(self) -> bool:
        """True if config or machine refused the launch: no fault of the trainer, no evidence."""
        return self.status in (LaunchStatus.CONFIG_ERROR, LaunchStatus.ENVIRONMENT_ERROR)
