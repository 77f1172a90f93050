"""What the trainer and everything that reads its runs agree on. Torch-free, imports none of ours.

Names of files, columns, events, variables and exit codes are written here once; writers and
readers take them from here. docs/trainer-contract.md says what a run directory holds. Digests, and
what a launch's token draws, are in `digests`; how files and links come onto the disk, in `writing`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Self

# The token is random; every process and every record of a launch carries it.
RUN_TOKEN_VARIABLE = "RUNBOOK_RUN_TOKEN"  # noqa: S105 - the name of a variable
# The run directory to write into; it must hold no earlier run.
RUN_DIR_VARIABLE = "RUNBOOK_RUN_DIR"
# Backends keep the timeout of a process group in whole milliseconds.
TIMEOUT_TOLERANCE_S = 2e-3
# With how many threads a process computes on the CPU; the second counts for MKL where both are set.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# The config file, where no --config is given.
CONFIG_VARIABLE = "CONFIG"


# -- files in a launch's run directory -------------------------------------------------------------

TRAINING_CSV = "training.csv"
VAL_CSV = "val.csv"
GATES_CSV = "gates.csv"
ENV_JSON = "env.json"
SDPA_AUDIT_JSON = "sdpa_audit.json"
PROFILE_JSON = "profile_rank0.json"
TRACE_FILE = "trace_rank0.json.gz"
# What `nsa.ceilings` measured on all ranks.
CEILINGS_JSON = "ceilings.json"
TENSORBOARD_DIR = "tb"
CHECKPOINTS_DIR = "checkpoints"
# Written by others to ask for an end: after this step, or after this block of a schedule.
HALT_FILE = ".HALT"
ENOUGH_FILE = ".ENOUGH"
# The schedule that the harness gives to --arms.
ARMS_JSON = "arms.json"
# When `nsa.inject` caused its fault.
INJECTED_JSON = "injected.json"
# A link to the newest run directory: beside those by hand, and in the folder of the harness's runs.
LATEST_LINK = "latest"
# In a checkpoint's folder.
CHECKSUMS_JSON = "checksums.json"
METADATA_FILE = ".metadata"

_CHECKPOINT = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Files of which each rank has its own. `tagged`: a word after the rank tells several apart."""

    stem: str
    suffix: str
    tagged: bool = False

    def name(self, rank: int, tag: object = "") -> str:
        """The file of a rank."""
        return f"{self.stem}{rank}{f'_{tag}' if self.tagged else ''}{self.suffix}"

    def glob(self, rank: int | None = None) -> str:
        """A pattern for the files of one rank, or of all."""
        return f"{self.stem}*{self.suffix}" if rank is None else self.name(rank, "*")

    def rank_of(self, name: str) -> int | None:
        """The rank whose file this is; None for any other file."""
        tag = "_.*" if self.tagged else ""
        match = re.fullmatch(f"{self.stem}(\\d+){tag}{re.escape(self.suffix)}", name)
        return int(match.group(1)) if match else None

    def found_in(self, folder: Path) -> dict[int, Path]:
        """The files of a run directory by rank, for files of which a rank has one."""
        with os.scandir(folder) as entries:
            found = {
                rank: folder / entry.name
                for entry in entries
                if (rank := self.rank_of(entry.name)) is not None and entry.is_file()
            }
        return dict(sorted(found.items()))


HEARTBEATS = RankFiles(stem="heartbeat_rank", suffix=".jsonl")
FLIGHTS = RankFiles(stem="flight_rank", suffix=".json")
# Written by NCCL's watchdog before it aborts a process: torch appends the rank to the stem.
NCCL_FLIGHTS = RankFiles(stem="nccl_flight_rank", suffix="")
# The tag is the process id, or a word for stacks that were taken from outside.
STACKDUMPS = RankFiles(stem="stackdump_rank", suffix=".txt", tagged=True)


def memory_file(*, when: str, step: int, rank: int) -> str:
    """The memory snapshot of a rank before ("pre") or after ("post") a step."""
    return f"mem_{when}_step{step}_rank{rank}.json"


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step_{step}"


def shard_file(rank: int) -> str:
    """The file of a checkpoint that holds a rank's share."""
    return f"__{rank}_0.distcp"


def checkpoint_step(name: str) -> int | None:
    """The step whose checkpoint this folder is; None for any other."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match.group(1)) if match else None


# How the reason of a rank begins that ends because DDP did not keep the ranks equal.
PARTED = "the parameters differ between the ranks"


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


class CheckpointError(NSAError):
    """No usable checkpoint; the message says what is wrong with each candidate."""


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
# In the evidence of an effect that was left to the trainer: what runs, and why, where that is not
# the fast way.
INSTEAD = "instead"
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
# Names that match the pattern and are none: of shells, of certificates, and the run's own token.
_HARMLESS = frozenset(
    {"PWD", "OLDPWD", RUN_TOKEN_VARIABLE, "XAUTHORITY", "SSL_CERT_FILE", "SSL_CERT_DIR"}
)
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


# -- exit codes ------------------------------------------------------------------------------------


class ExitCode(IntEnum):
    """Exit codes of the trainer. torchrun ends with 1 for each failure: see the `exit` event."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """A code that knows its meaning."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    SUCCESS = 0, "all steps done, or the schedule had enough"
    CRASH = 1, "crash, or the ranks' parameters differ at the end"
    CONFIG = 2, "config, command line, data that cannot be had, a used run directory"
    HALTED = 10, "halted by the file .HALT"
    NONFINITE = 11, "non-finite loss or gradient"
    OUT_OF_MEMORY = 12, "out of memory"
    PREEMPTED = 13, "pre-empted: SIGTERM or SIGINT"


# -- columns ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a CSV file. `filled`: never empty (a NaN is written as text)."""

    name: str
    meaning: str
    unit: str = ""
    kind: type = float
    filled: bool = False


TRAINING_COLUMNS = (
    Column("step", "optimizer step, from 1", kind=int, filled=True),
    Column("loss", "mean over all ranks and micro-batches", "nats", filled=True),
    Column("lr", "learning rate"),
    Column("toks_per_s", "tokens over dt_s", "tok/s", filled=True),
    Column("tokens", "of all ranks and micro-batches", "tokens", filled=True),
    Column("dt_s", "wall time of exactly this step", "s", filled=True),
    Column("grad_norm", "before clipping"),
    Column("mem_mib", "CUDA: peak of all tensors; CPU: resident memory", "MiB"),
    Column("arm", "name of the arm, empty without a schedule", kind=str),
    Column("block", "number of the block in the schedule", kind=int, filled=True),
    Column("warmup", "1 for a warm-up step of its block", kind=bool, filled=True),
    Column("fetch_s", "waiting for data", "s"),
)
VAL_COLUMNS = (
    Column("step", "optimizer step", kind=int, filled=True),
    Column("loss", "on documents never trained on", "nats", filled=True),
)
GATES_COLUMNS = (
    Column("step", "optimizer step", kind=int, filled=True),
    Column("entropy", "of the gates' shares, over ln 3, of the layer where it is lowest"),
    Column("max_gate", "largest share of a branch, of the layer where it is largest"),
    Column("entropy_mean", "the entropy as a mean over the layers"),
    Column("max_gate_mean", "the largest share as a mean over the layers"),
    Column("share_cmp", "mean share of the compressed branch"),
    Column("share_sel", "mean share of the selected branch"),
    Column("share_win", "mean share of the window"),
    Column("sel_blocks_mean", "blocks that a query attends to", "blocks"),
    Column("sel_forced_share", "part of them that is forced"),
)


def names(columns: Iterable[Column]) -> tuple[str, ...]:
    """The columns' names, in the file's order."""
    return tuple(column.name for column in columns)


# -- heartbeats ------------------------------------------------------------------------------------


class Phase(StrEnum):
    """What a rank is doing: the `phase` of every heartbeat."""

    INIT = "init"
    DATA = "data"
    FIRST_STEP = "first_step"
    STEP = "step"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"
    PROFILE = "profile"
    EXIT = "exit"


# Of every heartbeat: wall and monotonic clock in seconds, memory in MiB (cuda null on a CPU).
COMMON_FIELDS = (
    "event", "ts", "mono", "rank", "pid", "token", "step", "phase", "rss_mib", "cuda_mib",
)  # fmt: skip


class Event(StrEnum):
    """What a heartbeat tells, and the fields that it carries beside `COMMON_FIELDS`, in order."""

    fields: tuple[str, ...]

    def __new__(cls, value: str, fields: str = "") -> Event:
        """An event that knows its fields."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.fields = tuple(fields.split())
        return member

    BOOT = "boot"
    DATA_START = "data_start"
    INIT_DONE = "init_done"
    PROOF = (
        "proof",
        "loss positions own_gradient kept mean_low mean_high wire missing norm_told "
        "norm_before norm_after logit_gradient oracle weights text",
    )
    STEP_START = "step_start"
    FETCHED = "fetched"
    RECOMPUTED = "recomputed"
    PROFILER = "profiler", "active"
    PROFILE_SAVE = "profile_save"
    PROGRESS = "progress", "loss toks_per_s fetch_s grad_norm gate_entropy max_gate"
    STEP_END = "step_end", "embedded data mem_mib reserved_mib cpu_s"
    EVAL_START = "eval_start"
    EVAL = "eval", "loss losses again embedded data seconds"
    CHECKPOINT_START = "checkpoint_start"
    CHECKPOINT = "checkpoint", "path sha256 seconds held_up_s"
    MEMORY_DUMP = "memory_dump", "path"
    DDP_BUCKETS = "ddp_buckets", "arm block sizes_mib bytes last_bytes"
    COMPILED = "compiled", "where timed added graphs recorded breaks"
    EFFECT = "effect", "toggle value took_effect evidence arm block"
    ARM_FAILED = "arm_failed", "arm block error"
    ENOUGH = "enough"
    CEILING_START = "ceiling_start", "ceiling"
    NONFINITE = "nonfinite", "value"
    HALT = "halt", "reason"
    EXIT = (
        "exit",
        "code reason steps_done param_hash fetched_sum embedded_sum moved largest_lr updates "
        "summed shadow recomputed proof saved in_force",
    )


# Of the first weights: how many of a piece's first elements tell their signs.
WEIGHT_SIGNS = 64


# -- flight records --------------------------------------------------------------------------------

FLIGHT_COLUMNS = ("seq", "op", "sizes", "dtypes", "created_ns", "retired")


def flight_row(entry: Mapping[str, Any]) -> list[Any]:
    """FLIGHT_COLUMNS of one collective, from an entry of torch's flight recorder."""
    return [
        entry.get("collective_seq_id"),
        str(entry.get("profiling_name", "")).partition(":")[2],
        entry.get("input_sizes", []),
        entry.get("input_dtypes", []),
        entry.get("time_created_ns"),
        bool(entry.get("retired")),
    ]


# -- ceilings of the devices -----------------------------------------------------------------------


class Ceiling(StrEnum):
    """What `nsa.ceilings` measures, in its order; fields of each rank in its document."""

    MATMUL = "matmul"
    MEMORY_COPY = "memory_copy"
    HOST_COPY = "host_copy"
    ALL_REDUCE = "all_reduce"
    LATENCY = "all_reduce_latency"
