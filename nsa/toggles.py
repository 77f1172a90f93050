"""Every `NSA_*` variable there is, in one table; nothing else in the program reads them.

The trainer, env.json, the command line of the runbook and the documentation are all fed from
`TOGGLES`. A name that is not in the table, or a value its row does not allow, is an error that
lists everything wrong. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nsa.contract import NSAError, did_you_mean, raise_problems

Kind = Literal["bool", "int", "float", "choice"]
Value = bool | int | float | str | None
Reader = Literal["trainer", "watchdog", "tests"]

PREFIX = "NSA_"
TRUE_WORDS = ("1", "true", "on", "yes")
FALSE_WORDS = ("0", "false", "off", "no")


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """One row: what the variable means, what it may hold, and which seed asks for it.

    default None means that the config file decides. `arm`: may change between the blocks of one
    launch. `reader`: which part of the program acts on it.
    """

    name: str
    kind: Kind
    default: Value
    meaning: str
    seed: str = "-"
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    arm: bool = False
    reader: Reader = "trainer"

    def allowed(self) -> str:
        """The allowed values, for messages and tables."""
        if self.kind == "bool":
            return "0 or 1"
        if self.kind == "choice":
            return ", ".join(self.choices)
        what = "a whole number" if self.kind == "int" else "a number"
        if self.minimum is None:
            return what
        if self.maximum is None:
            return f"{what} >= {self.minimum:g}"
        return f"{what} in {self.minimum:g} .. {self.maximum:g}"

    def parse(self, text: str) -> Value:
        """Read a value as typed by a person. Raises NSAError with the allowed values."""
        value = self._convert(text.strip())
        if value is None:
            raise NSAError(
                f"{self.name}={text!r}: allowed is {self.allowed()} ({self.meaning}); "
                f"unset it to use {self.default_text()}"
            )
        return value

    def default_text(self) -> str:
        """The default in words."""
        return "the config's value" if self.default is None else f"the default {self.default!r}"

    def _convert(self, text: str) -> Value:
        if self.kind == "bool":
            return _bool(text)
        if self.kind == "choice":
            return text.lower() if text.lower() in self.choices else None
        number = _number(text, whole=self.kind == "int")
        if number is None:
            return None
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        return number if low <= number <= high else None


def _bool(text: str) -> bool | None:
    if text.lower() in TRUE_WORDS:
        return True
    return False if text.lower() in FALSE_WORDS else None


def _number(text: str, *, whole: bool) -> int | float | None:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _flag(name: str, default: bool | None, meaning: str, seed: str, **more: bool) -> Toggle:
    return Toggle(
        name=PREFIX + name,
        kind="bool",
        default=default,
        meaning=meaning,
        seed=seed,
        arm=more.get("arm", False),
    )


def _count(name: str, default: int | None, meaning: str, seed: str, *, minimum: int = 0) -> Toggle:
    return Toggle(
        name=PREFIX + name, kind="int", default=default, meaning=meaning, seed=seed, minimum=minimum
    )


def _real(
    name: str,
    default: float | None,
    meaning: str,
    seed: str,
    *,
    minimum: float,
    maximum: float | None = None,
    arm: bool = False,
) -> Toggle:
    return Toggle(
        name=PREFIX + name,
        kind="float",
        default=default,
        meaning=meaning,
        seed=seed,
        minimum=minimum,
        maximum=maximum,
        arm=arm,
    )


def _watch(name: str, kind: Kind, default: Value, meaning: str, top: float | None = None) -> Toggle:
    return Toggle(
        name=f"{PREFIX}WATCH_{name}",
        kind=kind,
        default=default,
        meaning=meaning,
        seed="000, 003",
        minimum=None if kind == "bool" else 0,
        maximum=top,
        reader="watchdog",
    )


_ROWS: tuple[Toggle, ...] = (
    _flag("PREFILL_BATCHED", False, "batched prefill instead of token by token", "000, 001, 002"),
    _flag("SEL_RANGES_V2", True, "vectorised selection ranges (0: plain loops)", "000", arm=True),
    _flag("USE_TRITON_SEL", None, "Triton kernel for the selected branch", "-", arm=True),
    _flag("SDPA_AUDIT", False, "record the kernel that really ran per branch", "000", arm=True),
    _flag("SDPA_FLASH_ONLY", False, "allow only the flash kernel", "000, 002", arm=True),
    _flag("SDPA_NO_FLASH", False, "forbid the flash kernel", "000, 002, 004", arm=True),
    _flag("USE_FA2", False, "ask for the flash_attn package", "002"),
    _flag("NVTX", False, "emit NVTX ranges", "000"),
    _flag("OPT_FUSED", False, "fused AdamW", "000", arm=True),
    Toggle(
        name=PREFIX + "DDP_COMPRESS",
        kind="choice",
        default="off",
        choices=("off", "bf16", "fp16"),
        meaning="type of the gradients on the wire",
        seed="000, 004",
        arm=True,
    ),
    _real(
        "DDP_BUCKET_MB",
        25.0,
        "bucket cap of DDP, MiB",
        "000, 004",
        minimum=0.01,
        maximum=4096,
        arm=True,
    ),
    _flag("DDP_STATIC_GRAPH", False, "tell DDP that the graph never changes", "002, 004", arm=True),
    _flag("DDP_FIND_UNUSED", False, "let DDP search for unused parameters", "002, 004", arm=True),
    _flag("DDP_DISABLE_GC", True, "gradient checkpointing off under DDP", "002, 004"),
    _flag("DDP_SAFE_MODE", False, "conservative DDP: no compression, no fused kernels", "002"),
    _real("PG_TIMEOUT_MIN", 15.0, "process-group timeout, minutes", "004", minimum=0.01),
    _flag("TB_DISABLE", True, "0 writes TensorBoard events to tb/", "000, 002"),
    _flag("DISABLE_CSV_LOGS", False, "write no training.csv and val.csv", "002"),
    _flag("DISABLE_AUX_STATS", False, "gate health only, no branch statistics", "000, 002"),
    _count("HEARTBEAT_EVERY", 1, "steps between progress heartbeats", "-", minimum=1),
    _count("MEM_DUMP_EVERY", 0, "steps between memory snapshots, 0 for none", "002"),
    _count("ACCUM", None, "micro-batches per optimizer step", "002", minimum=1),
    _real("LR", None, "learning rate", "002", minimum=0.0, maximum=10.0),
    _count("SEQ_LEN", None, "tokens per sequence", "-", minimum=2),
    _count("BATCH_SIZE", None, "global batch, sequences", "-", minimum=1),
    _real("SCALER_INIT_SCALE", 65536.0, "first scale of the fp16 scaler", "002", minimum=1.0),
    _count("SCALER_GROWTH_INTERVAL", 2000, "good steps before the scale grows", "002", minimum=1),
    _real("SCALER_GROWTH_FACTOR", 2.0, "factor of that growth", "002", minimum=1.0),
    _real(
        "SCALER_BACKOFF_FACTOR", 0.5, "factor after an overflow", "002", minimum=0.01, maximum=0.99
    ),
    _watch("HEARTBEAT_STALL_S", "float", 180.0, "seconds without a heartbeat that mean a stall"),
    _watch("FLATLINE_N", "int", 4, "equal throughput readings that mean a flat line"),
    _watch("GATE_COLLAPSE_N", "int", 3, "bad gate readings in a row that mean a collapse"),
    _watch("GATE_ENTROPY_MIN", "float", 0.2, "gate entropy under which a reading is bad", 1.0),
    _watch("GATE_MAX_THRESHOLD", "float", 0.9, "largest gate share above which it is bad", 1.0),
    _watch("INTERVAL_S", "float", 30.0, "seconds between two looks"),
    _watch("HALT", "bool", True, "write .HALT on an anomaly"),
    Toggle(
        name=PREFIX + "TEST_SEL_PACK",
        kind="bool",
        default=False,
        meaning="run the parity tests on packed selection ranges too",
        seed="000",
        reader="tests",
    ),
)

TOGGLES: dict[str, Toggle] = {row.name: row for row in _ROWS}
ARM_TOGGLES: tuple[str, ...] = tuple(row.name for row in _ROWS if row.arm)


@dataclass(frozen=True, kw_only=True)
class ToggleSet:
    """The values in force. `sources` has a name only where something set it explicitly."""

    values: Mapping[str, Value]
    sources: Mapping[str, str]

    def flag(self, name: str) -> bool:
        """Value of a yes/no toggle; an unset one that the config decides reads False."""
        return bool(self.values[name])

    def number(self, name: str) -> float:
        """Value of a numeric toggle that has a default."""
        value = self.values[name]
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} has no number: {value!r}")
        return value

    def text(self, name: str) -> str:
        """Value of a choice."""
        return str(self.values[name])

    def is_set(self, name: str) -> bool:
        """Was it given, rather than left at its default?"""
        return name in self.sources

    def replaced(self, changes: Mapping[str, Value], source: str) -> ToggleSet:
        """The same set with some values changed (an arm of a schedule, the safe mode)."""
        return ToggleSet(
            values={**self.values, **changes},
            sources={**self.sources, **dict.fromkeys(changes, source)},
        )

    def describe(self) -> list[dict[str, Value]]:
        """Rows for env.json: name, value, default, source."""
        return [
            {
                "name": row.name,
                "value": self.values[row.name],
                "default": row.default,
                "source": self.sources.get(row.name, "default"),
            }
            for row in _ROWS
        ]


def parse_toggles(variables: Mapping[str, str], *, source: str = "environment") -> ToggleSet:
    """Read every `NSA_*` name of `variables`.

    Raises NSAError that lists every unknown name (with the nearest known one), every bad value
    and every contradiction.
    """
    values, problems = read_values(variables)
    merged = {row.name: values.get(row.name, row.default) for row in _ROWS}
    toggles = ToggleSet(values=merged, sources=dict.fromkeys(values, source))
    problems += contradictions(toggles)
    raise_problems("NSA_* variables", problems)
    return toggles


def read_values(variables: Mapping[str, str]) -> tuple[dict[str, Value], list[str]]:
    """The values given for known toggles, and a line for everything that is wrong."""
    values: dict[str, Value] = {}
    problems: list[str] = []
    for name in sorted(name for name in variables if name.startswith(PREFIX)):
        if name not in TOGGLES:
            problems.append(_unknown(name))
            continue
        try:
            values[name] = TOGGLES[name].parse(variables[name])
        except NSAError as error:
            problems.append(str(error))
    return values, problems


def _unknown(name: str) -> str:
    hint = did_you_mean(name, TOGGLES) or "; see `runbook toggles` for all names"
    return f"{name}: no such toggle{hint}"


_SAFE_MODE_OFF: dict[str, Value] = {
    "NSA_DDP_COMPRESS": "off",
    "NSA_DDP_STATIC_GRAPH": False,
    "NSA_OPT_FUSED": False,
    "NSA_SDPA_FLASH_ONLY": False,
}
SAFE_MODE: dict[str, Value] = {**_SAFE_MODE_OFF, "NSA_SDPA_NO_FLASH": True}


def contradictions(toggles: ToggleSet) -> list[str]:
    """Settings that cannot both hold."""
    problems = []
    if toggles.flag("NSA_SDPA_FLASH_ONLY") and toggles.flag("NSA_SDPA_NO_FLASH"):
        problems.append("NSA_SDPA_FLASH_ONLY=1 and NSA_SDPA_NO_FLASH=1 exclude each other")
    if toggles.flag("NSA_DDP_SAFE_MODE"):
        for name, safe in _SAFE_MODE_OFF.items():
            if toggles.is_set(name) and toggles.values[name] != safe:
                problems.append(
                    f"NSA_DDP_SAFE_MODE=1 needs {name}={safe!r}, but it is set to "
                    f"{toggles.values[name]!r}; unset one of the two"
                )
    return problems


def with_safe_mode(toggles: ToggleSet) -> ToggleSet:
    """The set with NSA_DDP_SAFE_MODE's consequences spelled out."""
    if not toggles.flag("NSA_DDP_SAFE_MODE"):
        return toggles
    return toggles.replaced(SAFE_MODE, "NSA_DDP_SAFE_MODE")
