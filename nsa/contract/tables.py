"""What a launch writes, as tables: exit codes, columns with units, heartbeats with fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any


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
        "loss loss_again positions own_gradient kept mean_low mean_high wire missing norm_told "
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
        "first_update summed shadow recomputed proof saved loader in_force",
    )


# Of the first weights: multiples of a piece's root mean square up to which its elements are
# counted, and how many of its first elements tell their signs.
WEIGHT_CUTS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
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
