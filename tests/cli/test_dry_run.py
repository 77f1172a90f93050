"""A dry run says what would run and starts nothing; what the help of every command has to say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from runbook.cli import COMMANDS
from runbook.cli._parser import CommandParser, parse_all, path_type
from runbook.config import registry
from tests.cli.shell import inside, runbook

PHASES = registry.phases()

ALL = tuple(name for name, phase in PHASES.items() if not phase.optional)
VERDICTS = re.compile(r"\b(GO|NO-GO|INCOMPLETE|PASS|PASSED|FAIL|FAILED|INVALID|SKIPPED)\b")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("empty")
    ended = runbook("run", "--dry-run", "--profile", "a100x2_pcie4", cwd=folder)
    assert (ended.code, ended.err) == (0, "")
    assert list(folder.iterdir()) == [], "from an empty folder, and nothing is written to it"
    return ended.out


def test_every_phase_in_order_with_its_commands(plan: str) -> None:
    headings = re.findall(r"^# (\d+/\d+) (\w+): ", plan, flags=re.MULTILINE)
    assert headings == [(f"{at}/{len(ALL)}", name) for at, name in enumerate(ALL, start=1)]
    # Arms take one line a round, inside the quotes of the command before them.
    commands = [line for line in plan.splitlines() if line and not line.startswith("#")]
    assert any("torchrun --nproc_per_node=2 -m nsa.train" in line for line in commands)
    assert any("python -m pytest -q --pyargs nsa.tests." in line for line in commands)
    baseline = next(line for line in commands if "--steps 100" in line)
    settings = {"NSA_PREFILL_BATCHED=1", "NSA_SEL_RANGES_V2=1", "NSA_DDP_COMPRESS=bf16"}
    settings |= {"NSA_DDP_BUCKET_MB=25", "NCCL_ALGO=Ring", "NCCL_PROTO=Simple"}
    assert settings <= set(baseline.split()) and "--dataset synthetic --ddp 1" in baseline


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run",), "later phases start only if preflight passes (else add --keep-going)"),
        (("run", "--keep-going"), "none: every launch starts (--keep-going)"),
        (("launch",), "each phase starts only if every required check before it passed"),
    ],
)
def test_what_holds_later_phases_back_is_told(
    tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    shown = inside(*words, "--dry-run", "--profile", "cpu", cwd=tmp_path).out
    assert re.findall(r"^# guard    (.*)$", shown, flags=re.MULTILINE) == ([told] if told else [])


@pytest.mark.parametrize("command", ["run", "launch"])
def test_a_hint_names_no_option_that_the_command_lacks(tmp_path: Path, command: str) -> None:
    words = (command, "--dry-run", "--profile", "a100x2_pcie4")
    shown = inside(*words, cwd=tmp_path, HF_ENDPOINT="http://127.0.0.1:9").out
    assert "duration not known yet" in shown
    hints = "\n".join(line for line in shown.splitlines() if line.startswith("#"))
    own = re.sub(r"runbook \w+ [^;`\n]*", "", hints)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", own))
    known = {flag for one in COMMANDS[command].parser()._actions for flag in one.option_strings}
    assert named and named <= known


def test_never_a_verdict(plan: str) -> None:
    assert not VERDICTS.search(plan)
    assert VERDICTS.search("baseline PASSED"), "the pattern can find one"


def test_settings_and_scale_reach_the_lines(tmp_path: Path) -> None:
    words = ("run", "--dry-run", "--phase", "baseline", "--profile", "cpu")
    plain = inside(*words, cwd=tmp_path).out
    changed = ("--set", "NSA_DDP_COMPRESS=off", "--set", "train.lr=0.002", "--steps-scale", "0.5")
    scaled = inside(*words, *changed, cwd=tmp_path).out
    differs = ["config changed (train.lr=0.002)", "settings changed (NSA_DDP_COMPRESS=off)"]
    told = f"# differs  {', '.join(differs)}: the verdict's first line will say so"
    assert "# differs" not in plain and told in scaled.splitlines()
    machine = inside(*words, *changed, "--json", cwd=tmp_path).out
    assert json.loads(machine)["caveats"] == differs
    assert "NSA_DDP_COMPRESS=bf16" in plain and "NSA_DDP_COMPRESS=off" in scaled
    assert "--set train.lr=0.002" in scaled
    steps = [int(re.findall(r"--steps (\d+)", text)[0]) for text in (plain, scaled)]
    assert steps[1] * 2 == steps[0]


@pytest.mark.parametrize(
    ("words", "phase"), [(("run", "--seed", "3"), "bucket_sweep"), (("launch",), "production")]
)
def test_every_command_is_there_in_full_once(
    tmp_path: Path, words: tuple[str, ...], phase: str
) -> None:
    words = (*words, "--profile", "a100x2_pcie4", "--dry-run")
    full = inside(*words, cwd=tmp_path).out
    launches = json.loads(inside(*words, "--json", cwd=tmp_path).out)["phases"]
    (planned,) = (one["launches"] for one in launches if one["name"] == phase)
    assert planned
    for one in planned:
        assert _blocks(full).count("".join(one["command"].split())) == 1


def _blocks(text: str) -> list[str]:
    """The commands of a dry run, what stands between its comments, without blanks."""
    parts = re.split(r"^#.*\n|^\n", text, flags=re.MULTILINE)
    return [block for part in parts if (block := "".join(part.split()))]


DEFAULT = re.compile(r"\bdefault: |\((?:the )?default\b|\bno default\b|\(default\b")
UNIT = re.compile(
    r"\b(seconds|steps?|tok/s|MiB|nats|share|rate|efficiency|factor|launch(es)?|ranks|devices"
    r"|currency|seed|change|loss|days|runs)\b"
)


def gaps(parser: CommandParser) -> list[str]:
    """What the help of this parser leaves open."""
    found = []
    for action in parser._actions:
        if action.nargs == 0 or not (action.option_strings or action.nargs in ("?", "*")):
            continue
        name, text = "/".join(action.option_strings) or str(action.metavar), action.help or ""
        if not DEFAULT.search(text):
            found.append(f"{name}: no word of its default")
        if action.type not in (None, str, path_type) and not UNIT.search(text):
            found.append(f"{name}: a number without a unit")
    return found


def example_words(examples: str) -> list[list[str]]:
    """The words after `runbook` of an epilog's commands, without redirections."""
    lines = [line for line in examples.splitlines() if line.startswith("  ")]
    found = re.findall(r"\brunbook (.*?)(?:\s{2,}|;|\||>|$)", "\n".join(lines), re.MULTILINE)
    return [shlex.split(words) for words in found]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_names_its_default_and_its_unit(name: str) -> None:
    assert gaps(COMMANDS[name].parser()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_two_examples_that_its_parser_takes(name: str) -> None:
    command = COMMANDS[name]
    lines = example_words(command.parser().epilog)
    assert len(lines) >= 2
    for word, *words in lines:
        assert word == name
        assert parse_all(command.parser(), words)[1] == [], words


@pytest.mark.parametrize("name", COMMANDS)
def test_a_default_that_is_told_is_the_parsers(name: str) -> None:
    for action in COMMANDS[name].parser()._actions:
        told = re.search(r"\(default: (\S+)\)$", action.help or "")
        if told and action.default not in (None, "", False, []):
            number = isinstance(action.default, int | float)
            assert told[1] == (f"{action.default:g}" if number else str(action.default)), action
