"""Defects that once gave GO, to be injected into a copy of the repository, and how they are written.

A defect is a list of edits: a text that occurs exactly once in a file, and what replaces it. Its
rows must not pass, and must say why in words that match `says`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One replacement. path: below the repository; old: occurs there exactly once."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Defect:
    """What is injected, the phases to run, the rows that must not pass, patterns of their reasons."""

    name: str
    area: str
    what: str
    edits: tuple[Edit, ...]
    phases: tuple[str, ...]
    rows: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


def edit(path: str, old: str, new: str) -> Edit:
    """A replacement in a file below nsa/."""
    return Edit(path=f"nsa/{path}", old=old, new=new)


def defect(
    name: str,
    area: str,
    what: str,
    *edits: Edit,
    rows: str,
    says: str | Sequence[str],
    phases: str = "baseline",
) -> Defect:
    """Rows and phases are words; a row belongs to the last phase unless it says otherwise."""
    names = tuple(phases.split())
    ids = tuple(row if "." in row else f"{names[-1]}.{row}" for row in rows.split())
    patterns = (says,) if isinstance(says, str) else tuple(says)
    return Defect(
        name=name, area=area, what=what, edits=edits, phases=names, rows=ids, says=patterns
    )


PARTS = "        parts = self.project(x)\n"
ATTENDED = "x = x + self.attention(self.attention_norm(x))"
FIRST_SAMPLE = "first = (step * self.world_size + self.rank) * self.batch_size"
WALL = "wall = now - self._begin"
CSV_LOSS = '"loss": agreed.loss,'
LOGITS = "logits = call(tokens[:, :-1])"
STEP_RATE = 'group["lr"] = rate'
DONE = "        self.done += 1\n"
PROGRESS = "        self._progress(item, agreed, rate)\n        self.termination"
_FIRST_KEY = "v_sel=parts.v_sel[:, :, :1].expand_as(parts.v_sel).contiguous()"
_LEAK = (
    "        if self.ranks.rank == 1:\n"
    '            self.__dict__.setdefault("leak", []).append(bytearray(b"x" * 2**20))\n'
)


def parts_with(changes: str) -> Edit:
    """The layer attends with some of its parts replaced."""
    return edit("layer.py", PARTS, f"{PARTS}        parts = replace(parts, {changes})\n")


_LR_0 = edit("train/engine.py", STEP_RATE, 'group["lr"] = 0.0')
_SAME_DATA = edit("data/generated.py", FIRST_SAMPLE, "first = step * self.batch_size")
_LEAKING = edit("train/loop.py", DONE, DONE + _LEAK)
_HALF = edit(
    "train/engine.py",
    LOGITS,
    f"tokens = tokens[:, : tokens.shape[1] // 2 + 1]\n            {LOGITS}",
)
_DT_HALVED = edit("train/clock.py", WALL, "wall = (now - self._begin) / 2")
_IDLE = "no gradient reaches [^;]*"

EIGHT = Defect(
    name="eight at once",
    area="all",
    what="lr 0; rank 1 reads rank 0's data; leak of 1 MiB a step on rank 1; half of each sequence; "
    "dt halved; compressed branch zero; selected branch sees the first key; gates constant",
    edits=(
        _LR_0,
        _SAME_DATA,
        _LEAKING,
        _HALF,
        _DT_HALVED,
        parts_with(f"v_cmp=0 * parts.v_cmp, {_FIRST_KEY}, gates=0 * parts.gates + 0.5"),
    ),
    phases=("baseline", "long_run"),
    rows=(
        *("baseline.accounts", "baseline.gradients", "baseline.oracle"),
        *("long_run.accounts", "long_run.gradients", "long_run.learns", "long_run.memory_plateau"),
    ),
    says=(
        "did not move",
        "read the same data",
        "rank 1: .*MiB",
        "takes the loss at 64",
        r"dt_s sums to 0\.[45]",
        rf"{_IDLE}attention\.k_cmp",
        rf"{_IDLE}attention\.k_sel",
        rf"{_IDLE}attention\.gates",
    ),
)

KNOWN: tuple[Defect, ...] = (
    defect(
        "lr-0",
        "optimizer",
        "the optimizer's rate is 0, the CSV shows the planned one",
        _LR_0,
        rows="gradients",
        says="did not move",
    ),
    defect(
        "attention-times-0",
        "layer",
        "attention adds nothing to the residual stream",
        edit("model.py", ATTENDED, ATTENDED.replace("+ ", "+ 0 * ")),
        rows="oracle gradients",
        says=("layer is off", _IDLE),
    ),
    defect(
        "compressed-branch-zero",
        "layer",
        "compressed values are 0",
        parts_with("v_cmp=0 * parts.v_cmp"),
        rows="oracle gradients",
        says=("attention is off", rf"{_IDLE}k_cmp"),
    ),
    defect(
        "selected-branch-zero",
        "layer",
        "selected values are 0",
        parts_with("v_sel=0 * parts.v_sel"),
        rows="oracle gradients",
        says=("attention is off", rf"{_IDLE}k_sel"),
    ),
    defect(
        "sliding-branch-zero",
        "layer",
        "sliding values are 0",
        parts_with("v_win=0 * parts.v_win"),
        rows="oracle gradients",
        says=("attention is off", rf"{_IDLE}k_win"),
    ),
    defect(
        "selected-first-key",
        "layer",
        "every query's selected branch returns the first value",
        parts_with(_FIRST_KEY),
        rows="oracle",
        says="attention is off",
    ),
    defect(
        "gates-constant",
        "gates",
        "every gate is 0.5, whatever the layer's input",
        parts_with("gates=0 * parts.gates + 0.5"),
        rows="oracle gradients",
        says=("attention is off", rf"{_IDLE}gates"),
    ),
    defect(
        "dt-halved",
        "time",
        "dt_s is half of the wall time",
        _DT_HALVED,
        rows="accounts",
        says=r"dt_s sums to 0\.[45]",
    ),
    defect(
        "optimizer-outside-the-step",
        "time",
        "dt_s leaves out clipping and the optimizer",
        edit("train/clock.py", WALL, f'{WALL} - self._parts["optimizer"]'),
        rows="accounts",
        says="dt_s sums to 0",
    ),
    defect(
        "dt-invented",
        "time",
        "dt_s is a made-up 4 ms with jitter",
        edit("train/clock.py", WALL, "wall = 0.004 + 0.0005 * (now % 1.0)"),
        rows="accounts",
        says="dt_s sums to",
    ),
    defect(
        "rank-1-reads-rank-0s-data",
        "data",
        "the rank does not count in the number of a sample",
        _SAME_DATA,
        rows="accounts",
        says="read the same data",
    ),
    defect(
        "half-of-each-sequence",
        "data",
        "only the first half of each sequence goes through the model",
        _HALF,
        rows="accounts",
        says=("embedded 64 tokens", "takes the loss at 64"),
    ),
    defect(
        "csv-loss-of-the-step-before",
        "records",
        "training.csv shows every loss one step late",
        edit("train/settle.py", CSV_LOSS, '"loss": self.__dict__.get("late", agreed.loss),'),
        edit("train/settle.py", PROGRESS, f"        self.late = agreed.loss\n{PROGRESS}"),
        rows="accounts",
        says="loss of step",
    ),
    defect(
        "csv-loss-constant",
        "records",
        "training.csv repeats the first loss",
        edit("train/settle.py", CSV_LOSS, '"loss": self.__dict__.setdefault("kept", agreed.loss),'),
        rows="accounts plausible",
        says=("loss of step", "the loss is"),
    ),
    defect(
        "leak-on-rank-1",
        "memory",
        "rank 1 keeps 1 MiB of every step",
        _LEAKING,
        phases="long_run",
        rows="memory_plateau",
        says="rank 1",
    ),
    defect(
        "fp32-on-the-wire",
        "gradients",
        "the hook sends fp32 and counts the bytes of bf16",
        edit("train/ddp.py", "div_(stats.world_size).to(stats.wire_dtype)", "div_(stats.world_size)"),
        edit("train/ddp.py", "wire.numel() * wire.element_size()", "wire.numel() * 2"),
        rows="gradients",
        says="travel as fp32, not as bf16",
    ),
    defect(
        "ranges-v1-under-the-name-v2",
        "selection",
        "the plain loops run under the name of the vectorized ranges",
        edit("attention/selection.py", 'ranges_v1 if version == "v1" else ranges_v2', "ranges_v1"),
        rows="toggles_effective",
        says="NSA_SEL_RANGES_V2",
    ),
    defect(
        "one-process-writes-both-heartbeats",
        "heartbeats",
        "rank 0 writes the heartbeats of rank 1 too",
        edit(
            "train/heartbeat.py",
            "self._file = LineFile(run_dir / HEARTBEATS.name(self.rank))\n",
            'own = HEARTBEATS.name(0) if self.rank == 0 else "unseen.jsonl"\n'
            "        self._file = LineFile(run_dir / own)\n"
            "        if self.rank == 0:\n"
            "            self._twin = LineFile(run_dir / HEARTBEATS.name(1))\n",
        ),
        edit(
            "train/heartbeat.py",
            "            self._file.append(json.dumps(line))\n",
            "            self._file.append(json.dumps(line))\n"
            "            if self.rank == 0:\n"
            '                self._twin.append(json.dumps(line | {"rank": 1}))\n',
        ),
        rows="accounts",
        says="are one process",
    ),
)
