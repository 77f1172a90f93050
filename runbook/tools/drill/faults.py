"""The faults that can be injected on one machine, and what counts as noticing each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from runbook.errors import UsageError, did_you_mean
from runbook.folder.names import ANOMALIES_JSONL, ANOMALY_TYPE, INCIDENT_JSON
from runbook.records import LaunchStatus

BUDGET_S = 3.0
# After a budget is over: evidence, end, verdict. A crash has no budget, only this (and 2 s).
MARGIN_S = 2.0

_CRASHED, _HUNG = LaunchStatus.CRASHED, LaunchStatus.HUNG
_HALTED, _DONE = LaunchStatus.HALTED, LaunchStatus.COMPLETED
_STACKS = ("stackdump_rank",)
_RECORDS = ("stackdump_rank", "flight_rank", INCIDENT_JSON)


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what is injected where, and what the harness must say.

    `threshold_s` is the budget of the phase it is injected in, 0 where the kernel tells at once.
    `culprit` None means that no rank may be blamed. `cause` is a regular expression. `evidence`
    are parts of file names. `scene` is the way of running it: in a launch, or to the harness.
    `late_s` is allowed beyond the threshold, besides the margin of 2 s, where the statistics of
    several steps are needed. In repetitions the step is moved by up to `spread`, at random.
    """

    name: str
    title: str
    inject: str = "none"
    rank: int = 1
    step: int = 6
    steps: int = 2000
    status: LaunchStatus = _CRASHED
    or_status: LaunchStatus | None = None
    culprit: int | None = 1
    cause: str = ""
    threshold_s: float = 0.0
    late_s: float = 0.0
    evidence: tuple[str, ...] = ()
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    budgets: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    scene: str = "launch"
    note: str = ""
    spread: int = 0

    @property
    def limit_s(self) -> float:
        """Seconds from injection to the verdict, everything dead, that are good enough."""
        return self.threshold_s + MARGIN_S + self.late_s


_hang = partial(
    Fault, status=_HUNG, cause="hang: rank 1 silent", threshold_s=BUDGET_S, evidence=_RECORDS
)
_halt = partial(
    Fault,
    status=_HALTED,
    culprit=None,
    late_s=5.0,
    step=30,
    evidence=(ANOMALY_TYPE, ANOMALIES_JSONL),
)
_control = partial(Fault, status=_DONE, culprit=None, steps=30)

_SAVING = {"train.save_every": 6}
_EVALUATING = {"train.eval_every": 6}

_ROWS = (
    Fault("exit", "os._exit(7)", "exit", cause="exit code 7"),
    Fault("sigkill", "SIGKILL", "kill", cause="SIGKILL"),
    Fault("segv", "segmentation fault", "segv", cause="SIGSEGV", evidence=_STACKS),
    Fault("abort", "abort()", "abort", cause="SIGABRT", evidence=_STACKS),
    Fault("exception", "exception", "exception", cause="ZeroDivisionError"),
    Fault("sigterm_rank", "SIGTERM to one rank", "term", status=LaunchStatus.PREEMPTED,
          cause="SIGTERM"),
    _hang("sleep", "sleep in a step", "sleep"),
    _hang("busy_loop", "while True in a step", "spin"),
    _hang("sleep_backward", "sleep in the backward pass", "sleep_backward"),
    _hang("hang_rank0", "sleep in rank 0", "sleep", rank=0, culprit=0, cause="hang: rank 0"),
    _hang("frozen", "SIGSTOP", "stop", cause="frozen: rank 1", evidence=("stackdump_rank0",)),
    _hang("frozen_rank0", "SIGSTOP of rank 0", "stop", rank=0, culprit=0, cause="frozen: rank 0",
          evidence=("stackdump_rank1",)),
    _hang("hang_init", "hang before the first step", "hang_init", threshold_s=10.0,
          budgets={"init_s": 10.0}, cause="rank 1 silent .* phase init"),
    _hang("hang_eval", "hang in an evaluation", "hang_eval", config=_EVALUATING,
          budgets={"eval_s": BUDGET_S}, cause="phase eval"),
    _hang("hang_checkpoint", "hang in a checkpoint", "hang_checkpoint", config=_SAVING,
          budgets={"checkpoint_s": BUDGET_S}, cause="phase checkpoint"),
    _hang("hang_exit", "hang after the last step", "hang_exit", steps=10,
          budgets={"exit_s": BUDGET_S}),
    _hang("data_stall", "iterator that gives no batch", "data_stall", cause="data stall: rank 1"),
    _hang("clock_jump_hang", "clock jumps an hour, then a hang", "clock_jump_hang"),
    Fault("desync_op", "another collective on one rank", "other_op", cause="desync at collective",
          threshold_s=BUDGET_S, or_status=_HUNG, evidence=_RECORDS[1:]),
    Fault("desync_order", "an extra collective on one rank", "extra_collective",
          cause="desync at collective", threshold_s=BUDGET_S, or_status=_HUNG,
          evidence=_RECORDS[1:]),
    Fault("desync_shape", "another shape on one rank", "other_shape", cause="desync at collective",
          threshold_s=BUDGET_S, or_status=_HUNG, evidence=_RECORDS[1:]),
    _control("straggler_20ms", "20 ms late in every step", "late_20ms", steps=60,
             note="rank 1 comes"),
    _control("straggler_100ms", "100 ms late in every step", "late_100ms", steps=40,
             note="rank 1 comes"),
    Fault("nan", "NaN loss", "nan", status=LaunchStatus.NON_FINITE, culprit=None,
          cause=r"non-finite at step 6\b"),
    Fault("inf", "infinite loss", "inf", status=LaunchStatus.NON_FINITE, culprit=None,
          cause=r"non-finite at step 6\b"),
    _halt("loss_spike", "loss times five", "loss_spike", cause="loss_spike"),
    _halt("exploding_gradients", "gradients times a million", "exploding",
          cause="exploding_gradients"),
    _halt("zero_gradients", "gradients of zero", "zero_gradients", cause="zero_gradients", rank=-1),
    _halt("gate_collapse", "gates collapse to one branch", "gate_collapse", cause="gate_collapse",
          rank=-1, config={"train.log_every": 1}),
    _halt("flatline", "throughput reading stands still", "flatline", cause="throughput_flatline",
          rank=0),
    _halt("memory_growth", "24 MiB leak per step", "leak", cause="memory_growth", rank=0,
          late_s=30.0),
    Fault("device_oom", "torch.OutOfMemoryError", "device_oom", status=LaunchStatus.OUT_OF_MEMORY,
          cause="out of memory"),
    Fault("host_oom", "RLIMIT_AS, then 1 GiB", "host_oom", status=LaunchStatus.OUT_OF_MEMORY,
          cause="out of memory"),
    Fault("csv_disk_full", "disk full for training.csv", "csv_full", rank=0, culprit=0,
          cause=r"training\.csv.*No space left"),
    Fault("heartbeat_disk_full", "disk full for a heartbeat", "heartbeat_full",
          cause=r"heartbeat_rank1\.jsonl.*No space left"),
    Fault("checkpoint_disk_full", "RLIMIT_FSIZE in a checkpoint", "checkpoint_full", rank=0,
          culprit=0, step=12, config=_SAVING, cause=r"cannot write .*checkpoints/"),
    Fault("torn_csv", "half a row, then SIGKILL", "torn_csv", rank=0, culprit=0, cause="SIGKILL"),
    Fault("nul_csv", "NUL bytes at the end, then SIGKILL", "nul_csv", rank=0, culprit=0,
          cause="SIGKILL"),
    _control("clock_jump", "clock jumps an hour, nothing else", "clock_jump"),
    _control("slow_phases", "4 s first step, evaluation and checkpoint", "slow_phases", step=4,
             steps=12, config={"train.save_every": 6, "train.eval_every": 6}),
    _control("config_override", "toggles and config in the machine's environment", "none", steps=8,
             machine={"NSA_SEQ_LEN": "32", "CONFIG": "/nowhere.yaml", "NSA_LR": "9"},
             scene="override"),
    _control("port_in_use", "another program listens on the port", "none", steps=8, scene="port"),
    _control("leftover_trainer", "a trainer of another run is alive", "none", steps=8,
             scene="leftover"),
    _control("checkpoint_truncated", "newest checkpoint cut short, then resumed", "none", steps=14,
             scene="checkpoint_truncated"),
    _control("checkpoint_bit_flip", "one bit of the newest checkpoint flipped, then resumed",
             "none", steps=14, scene="checkpoint_bit_flip"),
    Fault("kill_launcher", "kill -9 of torchrun, detached grandchild", "kill_launcher", spread=60,
          culprit=None, cause="parent was ended by SIGKILL"),
    Fault("kill_rank", "kill -9 of a rank, detached grandchild", "kill_rank", spread=60,
          cause="SIGKILL"),
    Fault("kill_harness", "kill -9 of the harness, detached grandchild", "grandchild", spread=60,
          scene="kill_harness", culprit=None, status=LaunchStatus.NOT_RUN),
    Fault("sigint", "SIGINT to the harness", "grandchild", scene="sigint", culprit=None,
          status=LaunchStatus.INTERRUPTED, cause="SIGINT", late_s=3.0),
    Fault("sigterm", "SIGTERM to the harness", "grandchild", scene="sigterm", culprit=None,
          status=LaunchStatus.INTERRUPTED, cause="SIGTERM", late_s=3.0),
)  # fmt: skip

FAULTS: dict[str, Fault] = {row.name: row for row in _ROWS}


def select(text: str) -> list[Fault]:
    """The faults that a comma-separated list names; `all` is every one.

    Raises `UsageError` that lists every unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--faults names none", hint=f"known are: all, {', '.join(FAULTS)}")
    if "all" in names:
        return list(FAULTS.values())
    wrong = [f"unknown fault {n!r}{did_you_mean(n, FAULTS)}" for n in names if n not in FAULTS]
    if wrong:
        raise UsageError(wrong, hint=f"known are: all, {', '.join(FAULTS)}")
    return [FAULTS[name] for name in dict.fromkeys(names)]
