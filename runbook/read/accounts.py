"""Accounts that must balance: facts of one launch that two sources tell, held against each other.

What the trainer says about itself is believed only where something else in the same folder says
so too. Every function returns what does not balance, in words; a source that is missing does not
balance either. Judging a run and inspecting a directory use the same functions. `clocks` has
those on time, `data_account` those on data, `learning` those on the model, `training_accounts`
those on optimizer, memory and gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runbook.read.clocks import joined, time_account
from runbook.read.data_account import data_account
from runbook.read.documents import recorded_toggles
from runbook.read.fetch_account import fetch_account
from runbook.read.generated import GeneratedData
from runbook.read.saved_account import Keeping
from runbook.read.shapes import ENV, is_count, shaped
from runbook.records import RankExit
from runbook.records.evidence import RankLog
from runbook.records.launch import PROFILE_FLAG

if TYPE_CHECKING:
    import pandas as pd

# The same weights on the same tokens, by the same kernels in another order of sums: nats.
AGAIN_TOLERANCE = 2e-4
# Numbers of the same step in two files: only their rounding may differ.
COPY_TOLERANCE = 1e-6
# The same logits, summed in another order: nats.
LOSS_TOLERANCE = 2e-3

# Columns that have a second source in every rank's heartbeats.
_COPIED = ("step", "loss", "toks_per_s", "grad_norm", "tokens", "dt_s")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What env.json says that one launch trains: tokens of a rank in a step, in a pass."""

    nproc: int
    step_tokens: int
    pass_tokens: int
    seq_len: int
    block: int
    wire: str | None
    data: GeneratedData | None
    dtype: str
    device: str
    layers: int | None = None
    grad_clip: float | None = None
    steps: int | None = None
    profiled: bool = False
    eval_every: int = 0
    eval_batches: int = 0
    keeping: Keeping = field(default_factory=Keeping)
    # Of the model, by the config's names; empty where env.json does not tell.
    shape: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, env: Mapping[str, Any]) -> Workload:
        """From env.json. Raises `ValueError` where it lacks what is needed."""
        env, _ = shaped(env, ENV, "env.json")
        effective, config = env.get("effective") or {}, env.get("config") or {}
        lacking = [
            name
            for name, value in {"world_size": env.get("world_size"), **_needed(effective)}.items()
            if not value or (is_count(value) and value < 0)
        ]
        if lacking:
            raise ValueError(f"env.json has no usable {', '.join(lacking)}")
        nproc, seq_len = env["world_size"], effective["seq_len"]
        train = config.get("train") or {}
        per_pass = effective["per_rank_batch"] * seq_len
        return cls(
            nproc=nproc,
            step_tokens=per_pass * effective["accumulation"],
            pass_tokens=per_pass,
            seq_len=seq_len,
            block=(config.get("nsa") or {}).get("l") or 0,
            wire=_wire(env, nproc),
            data=GeneratedData.of(env),
            dtype=effective["dtype"],
            device=str(effective.get("device")),
            layers=(config.get("model") or {}).get("n_layers"),
            grad_clip=train.get("grad_clip"),
            steps=effective.get("steps"),
            profiled=any(str(word).startswith(PROFILE_FLAG) for word in env.get("argv") or ()),
            eval_every=train.get("eval_every") or 0,
            eval_batches=train.get("eval_batches") or 0,
            keeping=Keeping.of(train),
            shape={**(config.get("model") or {}), **(config.get("nsa") or {})},
        )


def _needed(effective: Mapping[str, Any]) -> dict[str, Any]:
    names = ("per_rank_batch", "seq_len", "accumulation", "dtype")
    return {f"effective.{name}": effective.get(name) for name in names}


def _wire(env: Mapping[str, Any], nproc: int) -> str | None:
    """The type that gradients should travel in; None where that is not known.

    The arms may differ in it, and of one rank env.json does not say whether DDP, whose hook
    narrows the gradients of a single rank too, was there: row `compression` asks for that.
    """
    if "NSA_DDP_COMPRESS" in str(env.get("arms") or ""):
        return None
    toggles = recorded_toggles(env)
    kind = str(toggles.get("NSA_DDP_COMPRESS") or "off")
    if kind == "off":
        return "fp32"
    return None if nproc == 1 else kind


def balance(
    frame: pd.DataFrame,
    ranks: Sequence[RankLog],
    work: Workload,
    duration_s: float | None,
    exits: Sequence[RankExit] = (),
) -> list[str]:
    """Everything about time, tokens, data, processes and copies that does not balance.

    `duration_s` and `exits` are what the launcher's clock shows; None where there was no launcher.
    """
    lacking = [name for name in _COPIED if name not in frame]
    if lacking:
        return [f"the CSV has no column {', '.join(lacking)}"]
    return [
        *process_account(ranks),
        *step_account(ranks),
        *time_account(frame, ranks, duration_s, exits, lag=int(work.device == "cuda")),
        *fetch_account(frame, ranks, work.device),
        *token_account(frame, ranks, work),
        *data_account(ranks, work),
        *copy_account(frame, ranks),
        *loss_account(frame, ranks),
        *first_loss_account(frame, ranks, work),
    ]


def step_account(ranks: Sequence[RankLog]) -> list[str]:
    """Every rank ends every step once, and the ranks hold the same parameters at the end."""
    problems = []
    for rank in ranks:
        if rank.steps is None:
            continue
        steps = rank.steps["step"]
        again = sorted({int(step) for step in steps[steps.duplicated()]})
        if again:
            problems.append(f"rank {rank.rank} ends {len(again)} steps twice, first {again[0]}")
    hashes = {rank.param_hash for rank in ranks}
    if len(hashes) > 1:
        problems.append("parameters differ between ranks at the end")
    return problems


def token_account(frame: pd.DataFrame, ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """Tokens that entered the embedding and positions that got a gradient, on every rank."""
    problems = []
    for rank in ranks:
        who = f"rank {rank.rank}"
        if rank.steps is None or rank.steps["embedded"].isna().any():
            problems.append(f"{who} does not say how many tokens it embedded")
            continue
        wrong = rank.steps[rank.steps["embedded"] != work.step_tokens]
        if len(wrong):
            step, seen = wrong["step"].iloc[0], wrong["embedded"].iloc[0]
            problems.append(
                f"{who} embedded {seen:.0f} tokens in step {step:.0f}, not {work.step_tokens}"
            )
        positions = (rank.proof or {}).get("positions")
        if positions != work.pass_tokens:
            problems.append(
                f"{who} takes the loss at {positions} positions of {work.pass_tokens} in a pass"
            )
        sums = [rank.ending.get(name) for name in ("fetched_sum", "embedded_sum")]
        if sums[0] is None or sums[0] != sums[1]:
            problems.append(f"{who} embeds other tokens than it fetched: {sums[1]} for {sums[0]}")
    if "tokens" in frame and (frame["tokens"] != work.step_tokens * work.nproc).any():
        problems.append("column tokens is not what the ranks embed together")
    return problems


def copy_account(frame: pd.DataFrame, ranks: Sequence[RankLog]) -> list[str]:
    """training.csv and the heartbeats tell the same steps, losses, norms and, on rank 0, rates."""
    problems = []
    for rank in ranks:
        if rank.steps is None or rank.steps["loss"].isna().all():
            problems.append(f"rank {rank.rank} reports no progress to hold the CSV against")
            continue
        if set(rank.steps["step"]) != set(frame["step"]):
            problems.append(
                f"the CSV has {len(frame)} steps, rank {rank.rank} ended {len(rank.steps)}"
            )
        # Agreed by all ranks; each has a rate of its own, and rank 0 writes the CSV.
        agreed = ("loss", "grad_norm")
        own = tuple(name for name in ("toks_per_s", "fetch_s") if name in frame)
        both = joined(frame, rank.steps, *agreed, *own)
        for name in (*agreed, *own) if rank.rank == 0 else agreed:
            said = both[f"{name}_said"]
            allowed = COPY_TOLERANCE * said.abs() + 1e-3 * (name == "toks_per_s")
            # A NaN in the CSV is near nothing.
            apart = said.notna() & ~((both[name] - said).abs() <= allowed)
            if apart.any():
                row = both[apart].iloc[0]
                problems.append(
                    f"{name} of step {row['step']:.0f} is {row[name]:.6g} in the CSV and "
                    f"{row[f'{name}_said']:.6g} in rank {rank.rank}'s heartbeats "
                    f"({int(apart.sum())} steps differ)"
                )
    return problems


def loss_account(frame: pd.DataFrame, ranks: Sequence[RankLog]) -> list[str]:
    """The loss of the first batch, as trained on and from its logits; that of steps run twice."""
    problems = []
    for rank in ranks:
        proof = rank.proof or {}
        loss, again = proof.get("loss"), proof.get("loss_again")
        if not _close(loss, again):
            problems.append(
                f"rank {rank.rank}: the loss of the first batch is {loss}, computed again {again}"
            )
    return problems + _again_account(frame, ranks)


def first_loss_account(frame: pd.DataFrame, ranks: Sequence[RankLog], work: Workload) -> list[str]:
    """The loss of the first step is that of the batch that was proven: the mean over the ranks.

    Where a step has several micro-batches, the proof knows only the first.
    """
    if work.step_tokens != work.pass_tokens or len(ranks) != work.nproc or not len(frame):
        return []
    proven = [(rank.proof or {}).get("loss") for rank in ranks]
    known = [float(loss) for loss in proven if isinstance(loss, int | float)]
    if len(known) < len(ranks):
        return []  # said by `loss_account`
    step, loss = int(frame["step"].iloc[0]), float(frame["loss"].iloc[0])
    mean = sum(known) / len(known)
    # On a GPU a step may be replayed, and the proof is launched from the host.
    allowed = AGAIN_TOLERANCE if work.device == "cpu" else LOSS_TOLERANCE
    if abs(loss - mean) <= allowed:
        return []
    return [
        f"the CSV's loss of step {step} is {loss:.5f}, the ranks' proof of its batch came to "
        f"{mean:.5f}"
    ]


def _again_account(frame: pd.DataFrame, ranks: Sequence[RankLog]) -> list[str]:
    """Steps whose loss in the CSV is not what the same batches give when they run once more."""
    told = dict(zip(frame["step"].tolist(), frame["loss"].tolist(), strict=True))
    problems = []
    for rank in ranks:
        again = rank.ending.get("recomputed") or {}
        steps, losses = (again.get(name) or () for name in ("steps", "losses"))
        if not steps or len(steps) != len(losses):
            problems.append(f"rank {rank.rank} computed no step's loss a second time")
            continue
        pairs = list(zip(steps, losses, strict=True))
        apart = [
            (step, loss)
            for step, loss in pairs
            if not abs(told.get(step, math.nan) - loss) <= AGAIN_TOLERANCE
        ]
        if apart:
            step, loss = apart[0]
            problems.append(
                f"the CSV's loss of step {step} is {told.get(step, math.nan):.5f}; rank "
                f"{rank.rank} computed it again, {loss:.5f} ({len(apart)} of {len(pairs)} steps "
                "differ)"
            )
    return problems


def _close(one: object, other: object) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return numbers and abs(float(str(one)) - float(str(other))) <= LOSS_TOLERANCE


def process_account(ranks: Sequence[RankLog]) -> list[str]:
    """One process for each rank, and one rank for each process."""
    writers: dict[int, int] = {}
    problems = []
    for rank in ranks:
        if not rank.pids:
            problems.append(f"rank {rank.rank} names no process")
        for pid in rank.pids:
            if writers.setdefault(pid, rank.rank) != rank.rank:
                problems.append(f"ranks {writers[pid]} and {rank.rank} are one process, {pid}")
    return problems
