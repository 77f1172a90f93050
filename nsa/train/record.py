"""What a run writes per step: the CSV files, TensorBoard, and the console."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa import contract
from nsa.launch.output import LineFile, say

if TYPE_CHECKING:
    from nsa.layer import GateStats

_TRAINING_NAMES = contract.names(contract.TRAINING_COLUMNS)
# Of gates.csv, whatever NSA_DISABLE_AUX_STATS says.
_ALWAYS = frozenset(("entropy", "max_gate", "entropy_mean", "max_gate_mean"))


class Tables:
    """training.csv, val.csv and gates.csv of rank 0: one row per step, written at once.

    `aux` off leaves the columns beyond gate health empty. Other ranks write nothing.
    """

    def __init__(self, run_dir: Path, *, rank: int, csv: bool, aux: bool, board: bool) -> None:
        self.aux = aux
        self._training = self._val = self._gates = None
        self._board: Any = None
        if rank != 0:
            return
        if csv:
            self._training = _table(run_dir / contract.TRAINING_CSV, contract.TRAINING_COLUMNS)
            self._val = _table(run_dir / contract.VAL_CSV, contract.VAL_COLUMNS)
        self._gates = _table(run_dir / contract.GATES_CSV, contract.GATES_COLUMNS)
        if board:
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

    def gates(self, step: int, stats: GateStats) -> None:
        """One reading of the gates."""
        numbers: dict[str, float] = asdict(stats)
        if self._gates is not None:
            shown = {n: v for n, v in numbers.items() if self.aux or n in _ALWAYS}
            cells = [_cell(shown.get(name, "")) for name in numbers]
            self._gates.append(f"{step}," + ",".join(cells))
        self._scalars(step, {"gate_entropy": stats.entropy, "max_gate": stats.max_gate})

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
