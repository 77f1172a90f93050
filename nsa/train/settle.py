"""From a finished step to its row, its heartbeat, and the decision whether to go on; evaluations.

Rows go to the CSV files and TensorBoard, a line of them to the console. An evaluation has the loss
of every held-out batch, and that of a drawn one by another way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nsa import contract
from nsa.contract import HALT_FILE, Event, ExitCode, Phase
from nsa.contract.digests import drawn_batch
from nsa.data import Source
from nsa.launch.asked import Block
from nsa.launch.output import Heartbeat, LineFile, say
from nsa.launch.process import GRACE_S, Termination
from nsa.layer import gate_stats
from nsa.step.engine import Engine
from nsa.step.numbers import Agreed, Arriving, Mark, Posted
from nsa.toggles import ToggleSet
from nsa.witness.shadow.recompute import loss_again
from nsa.witness.witness import Witness


@dataclass(frozen=True, kw_only=True)
class End:
    """Why the loop ended."""

    code: ExitCode
    reason: str


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A step whose numbers may still be on their way from the device."""

    step: int
    lr: float
    block: Block
    warmup: bool
    mark: Mark
    posted: Posted
    mem_mib: float
    # Of every layer, where the step's gates are read: a later step overwrites them.
    gates: Arriving | None = None


def halt_reason(path: Path) -> str:
    """`.HALT`, and the first line of what its writer put into it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""  # agreed with a rank that saw it on another machine
    return f"{HALT_FILE} ({text.splitlines()[0][:200]})" if text else HALT_FILE


def what_is_not_finite(agreed: Agreed) -> str:
    """`gradient norm nan, while the loss is 5.545`, `loss nan on rank 1, gradient norm nan`."""
    on = f" on {agreed.where}" if agreed.where else ""
    told = (("loss", agreed.loss, on), ("gradient norm", agreed.grad_norm, ""))
    bad = [f"{name} {value}{where}" for name, value, where in told if not math.isfinite(value)]
    fine = [f"while the {name} is {value:.4g}" for name, value, _ in told if math.isfinite(value)]
    return ", ".join([*bad, *fine])


class Settler:
    """Keeps steps until their numbers are there: none on the CPU, one step on CUDA.

    Every rank settles every step in the same order and from the same agreed values, so `end`
    becomes set on all ranks after the same step.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tables: Tables,
        heartbeat: Heartbeat,
        termination: Termination,
        halt_file: Path,
    ) -> None:
        self._halt_file = halt_file
        self.plan, self.tables = engine.plan, tables
        self.heartbeat, self.termination = heartbeat, termination
        self.lag = 1 if engine.device.type == "cuda" else 0
        self.end: End | None = None
        # The save that is under way has ended on all ranks.
        self.saved = False
        self._pending: deque[Pending] = deque()
        self._gates: tuple[float, float] | None = None
        self.every = int(self.plan.toggles.number("NSA_HEARTBEAT_EVERY"))
        self._first: int | None = None

    def reads_gates(self, step: int) -> bool:
        """Is this a step whose gates are read? The launch's first, and every `log_every`th."""
        self._first = self._first or step
        return step == self._first or step % self.plan.config.train.log_every == 0

    def add(self, item: Pending) -> None:
        """Take a step, and settle those whose numbers are there without waiting."""
        self._pending.append(item)
        self.drain(self.lag)

    def drain(self, keep: int = 0) -> None:
        """Wait for the steps' numbers and settle them, all but the last `keep`."""
        while len(self._pending) > keep:
            self._settle(self._pending.popleft())

    def _settle(self, item: Pending) -> None:
        agreed, seconds = item.posted.read(), item.mark.seconds()
        tokens = self.plan.tokens_per_step
        rate = tokens / seconds if seconds > 0 else 0.0
        self.saved = self.saved or agreed.saved
        self.tables.training(
            {
                "step": item.step,
                "loss": agreed.loss,
                "lr": item.lr,
                "toks_per_s": round(rate, 3),
                "tokens": tokens,
                "dt_s": round(seconds, 7),
                "grad_norm": agreed.grad_norm,
                "mem_mib": round(item.mem_mib, 1),
                "arm": item.block.arm,
                "block": item.block.index,
                "warmup": item.warmup,
                "fetch_s": round(item.mark.fetch_s, 7),
            }
        )
        self._progress(item, agreed, rate)
        self.termination.grace_s = max(GRACE_S, 4 * seconds)
        if self.end is None:
            self._decide(item, agreed)

    def _progress(self, item: Pending, agreed: Agreed, rate: float) -> None:
        if item.gates is not None:
            self._log(item, gate_stats(item.gates.read()), agreed, rate)
        if item.step % self.every == 0:
            self.heartbeat.write(
                Event.PROGRESS,
                step=item.step,
                loss=agreed.loss,
                toks_per_s=round(rate, 3),
                fetch_s=round(item.mark.fetch_s, 7),
                grad_norm=agreed.grad_norm,
                gate_entropy=self._gates[0] if self._gates else None,
                max_gate=self._gates[1] if self._gates else None,
            )

    def _log(self, item: Pending, stats: dict[str, float], agreed: Agreed, rate: float) -> None:
        self._gates = (stats["entropy"], stats["max_gate"])
        self.tables.gates(item.step, stats)
        arm = f" arm={item.block.arm}" if item.block.arm else ""
        say(
            f"[step {item.step}/{self.plan.total_steps}] loss={agreed.loss:.4f} "
            f"lr={item.lr:.3g} tok/s={rate:.1f} grad_norm={agreed.grad_norm:.3g}{arm}",
            rank=self.heartbeat.rank,
        )

    def _decide(self, item: Pending, agreed: Agreed) -> None:
        if agreed.nonfinite:
            value = agreed.grad_norm if math.isfinite(agreed.loss) else agreed.loss
            self.heartbeat.write(Event.NONFINITE, step=item.step, value=repr(value))
            reason = f"non-finite at step {item.step}: {what_is_not_finite(agreed)}"
            self.end = End(code=ExitCode.NONFINITE, reason=reason)
        elif agreed.halt:
            why = halt_reason(self._halt_file)
            self.heartbeat.write(Event.HALT, reason=why)
            self.end = End(code=ExitCode.HALTED, reason=f"{why} at step {item.step}")
        elif agreed.terminate:
            name = self.termination.reason or "a signal on another rank"
            self.end = End(code=ExitCode.PREEMPTED, reason=f"{name} at step {item.step}")


_TRAINING_NAMES = contract.names(contract.TRAINING_COLUMNS)
# Of gates.csv, whatever NSA_DISABLE_AUX_STATS says.
_ALWAYS = frozenset(("entropy", "max_gate", "entropy_mean", "max_gate_mean"))


class Tables:
    """training.csv, val.csv and gates.csv of rank 0: one row per step, written at once.

    Without `aux` the columns beyond gate health are empty. Other ranks write nothing.
    """

    def __init__(self, run_dir: Path, *, rank: int, toggles: ToggleSet) -> None:
        self.aux = not toggles.flag("NSA_DISABLE_AUX_STATS")
        self._training = self._val = self._gates = None
        self._board: Any = None
        if rank != 0:
            return
        if not toggles.flag("NSA_DISABLE_CSV_LOGS"):
            self._training = _table(run_dir / contract.TRAINING_CSV, contract.TRAINING_COLUMNS)
            self._val = _table(run_dir / contract.VAL_CSV, contract.VAL_COLUMNS)
        self._gates = _table(run_dir / contract.GATES_CSV, contract.GATES_COLUMNS)
        if not toggles.flag("NSA_TB_DISABLE"):
            self._board = open_board(run_dir / contract.TENSORBOARD_DIR)

    def running(self) -> dict[str, bool | None]:
        """What is really switched off, by toggle; None on ranks that write nothing anyway."""
        off = {
            "NSA_TB_DISABLE": self._board is None,
            "NSA_DISABLE_CSV_LOGS": self._training is None,
            "NSA_DISABLE_AUX_STATS": not self.aux,
        }
        return {name: value if self._gates is not None else None for name, value in off.items()}

    def training(self, row: dict[str, Any]) -> None:
        """One optimizer step; `row` has the header's names."""
        if self._training is not None:
            self._training.append(",".join(_cell(row[name]) for name in _TRAINING_NAMES))
        self._scalars(row["step"], {n: row[n] for n in ("loss", "lr", "toks_per_s", "grad_norm")})

    def val(self, step: int, loss: float) -> None:
        """One evaluation."""
        if self._val is not None:
            self._val.append(f"{step},{loss!r}")
        self._scalars(step, {"val_loss": loss})

    def gates(self, step: int, numbers: dict[str, float]) -> None:
        """One reading of the gates."""
        if self._gates is not None:
            shown = {n: v for n, v in numbers.items() if self.aux or n in _ALWAYS}
            cells = [_cell(shown.get(name, "")) for name in numbers]
            self._gates.append(f"{step}," + ",".join(cells))
        self._scalars(step, {"gate_entropy": numbers["entropy"], "max_gate": numbers["max_gate"]})

    def sync(self) -> None:
        """Put the rows on the disk."""
        for table in (self._training, self._val, self._gates):
            if table is not None:
                table.sync()
        if self._board is not None:
            self._board.flush()

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)


def _table(path: Path, columns: tuple[contract.Column, ...]) -> LineFile:
    table = LineFile(path)
    table.append(",".join(contract.names(columns)))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


def open_board(folder: Path) -> Any:
    """A TensorBoard writer, or None with a line in the log where the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        say(f"[tensorboard] not available: {error}; pip install 'nsa-runbook[tensorboard]'")
        return None
    return SummaryWriter(str(folder))


def evaluate(
    engine: Engine, batches: Iterable[Tensor], *, drawn: int
) -> tuple[float, list[float], Tensor | None]:
    """Next-token losses of these batches [B, S+1], in nats: the mean over all ranks and batches,
    and those of this rank's. Then the batch that was drawn, counted from 0; None where there are
    fewer. A collective of all ranks.
    """
    losses: list[float] = []
    kept: Tensor | None = None
    engine.model.eval()
    with torch.no_grad():
        for number, tokens in enumerate(batches):
            losses.append(float(engine.loss(tokens.to(engine.device), wrapped=False)))
            kept = tokens if number == drawn else kept
    engine.model.train()
    total, count = engine.ranks.sum([sum(losses), float(len(losses))])
    return total / count, losses, kept


class Evaluations:
    """The evaluations of a launch, each with its row and its heartbeat."""

    def __init__(
        self, engine: Engine, *, tables: Tables, heartbeat: Heartbeat, witness: Witness
    ) -> None:
        self._engine, self._witness = engine, witness
        self._tables, self._heartbeat = tables, heartbeat
        # By step.
        self.losses: dict[int, float] = {}

    def run(self, step: int, source: Source) -> None:
        """Evaluate after this step, on the source's held-out batches. For all ranks together."""
        beat, begin = self._heartbeat, perf_counter()
        rank = self._engine.ranks.rank
        beat.phase = Phase.EVAL
        beat.write(Event.EVAL_START)
        count = self._engine.plan.config.train.eval_batches
        drawn = drawn_batch(beat.token, rank, step, count)
        held_out = self._witness.held_out(source.validation(count))
        loss, losses, kept = evaluate(self._engine, held_out, drawn=drawn)
        self._witness.compiling.note("eval")
        self.losses[step] = loss
        self._tables.val(step, loss)
        # By another way, when whatever an evaluation sets has to be as it was.
        again = None
        if kept is not None:
            again = {"batch": drawn, "loss": loss_again(self._engine, kept)}
        beat.write(
            Event.EVAL,
            loss=loss,
            losses=losses,
            again=again,
            **self._witness.meter.take(),
            seconds=round(perf_counter() - begin, 4),
        )
        say(f"[eval] step {step} loss={loss:.4f}", rank=rank)
        beat.sync()
