"""What is asked of a launch: its command line, its schedule, and which kernels its toggles choose.

Torch-free, so that unknown flags, bad values and schedules, and kernels that this machine lacks,
are refused all at once before anything heavy is loaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsa.contract import CONFIG_VARIABLE, ExitCode, NSAError, did_you_mean
from nsa.settings import OVERRIDES, Overrides, is_text, refusal
from nsa.strict_yaml import scalar
from nsa.toggles import ARM_TOGGLES, AUTO, NEEDS_CUDA, ToggleSet, contradictions, read_values

TRITON = "triton"
_COMPILERS = ("g++", "clang++", "c++")


def triton_asked(toggles: ToggleSet, by_config: bool) -> str:
    """1, 0 or auto: are the package's Triton kernels wanted? by_config: its value."""
    given = toggles.values["NSA_USE_TRITON_SEL"]
    return str(int(by_config)) if given is None else str(given)


def why_no_triton(toggles: ToggleSet, by_config: bool, device: str) -> str | None:
    """Why the kernels that are asked for by name cannot run, with the remedy, or None."""
    if triton_asked(toggles, by_config) != "1":
        return None
    name = "NSA_USE_TRITON_SEL=1 / runtime.use_triton_sel"
    if device == "cpu":
        why = NEEDS_CUDA["NSA_USE_TRITON_SEL=1"]
        return f"{name}: {why}, this is cpu; set it to 0 or auto"
    if device == "cuda" and importlib.util.find_spec(TRITON) is None:
        return f"{name}: the package triton is not installed; set it to 0 or auto"
    return None


def why_not(toggles: ToggleSet, device: str) -> str | None:
    """Why the layers cannot run as asked by name, with the remedy, or None.

    device: cuda, cpu, or auto while that is not known yet.
    """
    if toggles.values["NSA_CUDA_GRAPHS"] is True and device == "cpu":
        return f"NSA_CUDA_GRAPHS=1: {NEEDS_CUDA['NSA_CUDA_GRAPHS=1']}, this is cpu; set it to 0"
    mode = toggles.text("NSA_COMPILE")
    problem = None if mode in ("off", AUTO) else why_not_compiled(toggles, device)
    return None if problem is None else f"NSA_COMPILE={mode}: {problem}"


def why_not_compiled(toggles: ToggleSet, device: str) -> str | None:
    """Why layers cannot be compiled here, with the remedy, or None; device as for `why_not`."""
    if not toggles.flag("NSA_PREFILL_BATCHED"):
        return "token by token, a graph would hold every token; set NSA_PREFILL_BATCHED=1"
    if device == "cuda" and importlib.util.find_spec(TRITON) is None:
        return "the package triton is not installed, which compiles for CUDA; use off"
    if device == "cpu" and not any(map(shutil.which, _COMPILERS)):
        return f"no C++ compiler here ({', '.join(_COMPILERS)}); install one or use off"
    return None


class ArmBlock(BaseModel):
    """`steps` measured steps with `set` in force, after the schedule's warm-up steps."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    block: Annotated[int, Field(ge=0)]
    arm: Annotated[str, Field(min_length=1, pattern=r"^[^,\n\r\"]+$")]
    steps: Annotated[int, Field(ge=1)]
    set: dict[str, str] = {}


class ArmFile(BaseModel):
    """The file given to `--arms`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    warmup_steps: Annotated[int, Field(ge=0)]
    blocks: Annotated[list[ArmBlock], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stretch of steps under one set of toggles; a plain run is one block without a name."""

    index: int
    arm: str
    warmup_steps: int
    steps: int
    toggles: ToggleSet

    @property
    def total_steps(self) -> int:
        """Rows that the block writes."""
        return self.warmup_steps + self.steps


def load_blocks(path: str | Path, toggles: ToggleSet) -> tuple[list[Block], ArmFile]:
    """Read a schedule over the launch's own toggles; `path` may be the JSON document itself.

    Raises ConfigError with every problem.
    """
    text = str(path)
    inline = text.lstrip().startswith("{")
    path = "{...}" if inline else path
    try:
        file = ArmFile.model_validate_json(text if inline else Path(text).read_bytes())
    except OSError as error:
        raise NSAError(f"--arms {path}: {error.strerror or error}") from error
    except ValidationError as error:
        lines = [
            f"--arms {path}: {'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}, "
            f"got {item['input']!r}"
            for item in error.errors(include_url=False)
        ]
        raise refusal(lines) from error
    problems: list[str] = []
    blocks = []
    for entry in file.blocks:
        where = f"--arms {path}: block {entry.block} ({entry.arm})"
        values, wrong = read_values({n: v for n, v in entry.set.items() if n in ARM_TOGGLES})
        wrong += [
            f"{name} cannot change inside a launch{did_you_mean(name, ARM_TOGGLES)}; "
            f"allowed: {', '.join(ARM_TOGGLES)}"
            for name in entry.set
            if name not in ARM_TOGGLES
        ]
        merged = toggles.replaced(values, f"arm {entry.arm}")
        problems += [f"{where}: {line}" for line in (*wrong, *contradictions(merged))]
        blocks.append(
            Block(
                index=entry.block,
                arm=entry.arm,
                warmup_steps=file.warmup_steps,
                steps=entry.steps,
                toggles=merged,
            )
        )
    if problems:
        raise refusal(problems)
    return blocks, file


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line after parsing; `settings` change the config file, `overrides` go over it.

    `resume` is where the path led when it was read: a launch by hand moves the link `latest` to
    itself before it loads anything.
    """

    config: str | None
    ddp: str
    resume: Path | None
    save: bool
    arms: str | None
    profile_steps: int
    run_steps: int
    settings: Mapping[str, Any]
    overrides: Overrides
    problems: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NSAError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m nsa.train",
        description="Train a Native-Sparse-Attention language model.",
        epilog="NSA_* variables: see `runbook toggles`. A flag wins over NSA_*, NSA_* over the "
        "config. Exit codes: " + "; ".join(f"{code:d} {code.meaning}" for code in ExitCode) + ".",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="config file; else CONFIG of the environment")
    for key, (flag, metavar, text) in OVERRIDES.items():
        add(flag, dest=key, metavar=metavar, help=text)
    add("--ddp", metavar="{0,1,auto}", default="auto", help="distributed data parallel")
    add("--resume", metavar="PATH", help="run directory, latest or checkpoint to go on from")
    add("--save", action="store_true", help="checkpoint at the end and when pre-empted")
    add("--synthetic-on-fail", action="store_true", help="go on with synthetic data, visibly")
    add("--arms", metavar="FILE|JSON", help="schedule of toggles within this launch")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="as if the config said so")
    add("--profile-steps", metavar="N", default="0", help="steps under the profiler")
    add(
        "--run-steps",
        metavar="N",
        default="0",
        help="steps of the whole run, of which this is a leg",
    )
    return parser


def parse_flags(argv: Sequence[str], environ: Mapping[str, str]) -> Flags:
    """Read the command line; whatever is wrong is in `problems`, not raised one by one.

    Raises NSAError only where a flag lacks its value; exits 0 for --help.
    """
    parser = _parser()
    known, unknown = parser.parse_known_args(list(argv))
    problems = list(_odd(unknown, sorted(parser._option_string_actions)))
    if known.ddp not in ("0", "1", "auto"):
        problems.append(f"--ddp {known.ddp}: allowed is 0, 1 or auto")
    profile = _count("--profile-steps", known.profile_steps, problems)
    run_steps = _count("--run-steps", known.run_steps, problems)
    settings = _settings(known.set, problems)
    return Flags(
        config=known.config or environ.get(CONFIG_VARIABLE) or None,
        ddp=known.ddp,
        resume=Path(known.resume).resolve() if known.resume else None,
        save=known.save,
        arms=known.arms,
        profile_steps=profile,
        run_steps=run_steps,
        settings=settings,
        overrides=_overrides(known),
        problems=tuple(problems),
    )


def _count(flag: str, text: str, problems: list[str]) -> int:
    value = scalar(text)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        problems.append(f"{flag} {text}: must be a whole number >= 0")
        return 0
    return value


def _odd(unknown: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """What is said of words that are no option; the value of one is not told twice."""
    for before, word in pairwise(["", *unknown]):
        if word.startswith("-"):
            name = word.partition("=")[0]
            yield f"{name}: no such flag{did_you_mean(name, options)}"
        elif not before.startswith("-") or "=" in before:
            yield f"{word}: unexpected word; every setting is a flag"


def _settings(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The `--set SECTION.KEY=VALUE` words; what cannot be one is added to the problems."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and section and key):
            problems.append(f"--set {word}: expected SECTION.KEY=VALUE, such as train.lr=0.001")
        elif name in found:
            problems.append(f"--set {name}: given twice")
        else:
            found[name] = _value(name, text)
    return found


def _overrides(known: argparse.Namespace) -> Overrides:
    given = {key: getattr(known, key) for key in OVERRIDES}
    found = {
        key: (_value(key, text), OVERRIDES[key][0])
        for key, text in given.items()
        if text is not None
    }
    if known.synthetic_on_fail:
        found["data.synthetic_on_fail"] = True, "--synthetic-on-fail"
    return found


def _value(key: str, text: str) -> Any:
    return text if is_text(key) else scalar(text)
