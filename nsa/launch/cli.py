"""The command line, checked as a whole: unknown flags, bad values and a missing config at once."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nsa.contract import CONFIG_VARIABLE, ExitCode, NSAError, did_you_mean
from nsa.settings import OVERRIDES, Overrides, is_text
from nsa.strict_yaml import scalar


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
    for flag, metavar, text in OVERRIDES.values():
        add(flag, metavar=metavar, help=text)
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
    options = sorted(parser._option_string_actions)
    problems = [_unknown(word, options) for word in unknown if word.startswith("-")]
    problems += _stray(unknown)
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


def _unknown(word: str, options: Sequence[str]) -> str:
    name = word.split("=", 1)[0]
    return f"{name}: no such flag{did_you_mean(name, options)}"


def _stray(unknown: Sequence[str]) -> list[str]:
    """Words that follow no flag; the value of an unknown flag is not reported twice."""
    stray = []
    for before, word in zip(["", *unknown], unknown, strict=False):
        value_of_unknown = before.startswith("-") and "=" not in before
        if not word.startswith("-") and not value_of_unknown:
            stray.append(f"{word}: unexpected word; every setting is a flag")
    return stray


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
    found: dict[str, tuple[Any, str]] = {}
    for key, (flag, _, _) in OVERRIDES.items():
        text = getattr(known, flag[2:].replace("-", "_"))
        if text is not None:
            found[key] = _value(key, text), flag
    if known.synthetic_on_fail:
        found["data.synthetic_on_fail"] = True, "--synthetic-on-fail"
    return found


def _value(key: str, text: str) -> Any:
    return text if is_text(key) else scalar(text)
