"""From what a person asked for to a setup that is sound, before anything starts.

What its launches need besides the program is looked at too: packages of the extras, the hub,
documents that can be read, and room for the checkpoints. What is generated needs none of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nsa.settings import VOCAB_SIZES, TrainerConfig
from runbook import BOARD, BOARD_TOGGLE, PROTOCOLS, absent, is_installed
from runbook.accounts.first_weights import DISK_MARGIN, checkpoint_gib, parameters
from runbook.config import Profile
from runbook.config.extends import load_preset
from runbook.config.load import load_profile
from runbook.config.plan import NO_BOARD
from runbook.config.precedence import gathered, with_config
from runbook.config.registry import Phase, select
from runbook.config.settings import parse_settings
from runbook.config.setup import RunOptions, Setup, phase_problems
from runbook.engine.earlier.standing import asked_for, planned_profile
from runbook.engine.plan import config_of, planned_problems
from runbook.errors import UsageError, choice_for
from runbook.files import not_text
from runbook.launch.launcher_api import launcher
from runbook.machine import git
from runbook.machine.gpu import detect_profile
from runbook.machine.identity import package_folders, package_under_test
from runbook.process import run_tool
from runbook.records import Launch
from runbook.records.launch import DATASET_FLAG, option

_OF_THE_HUB = "fineweb_edu"
_READ = (_OF_THE_HUB, "local")
# More would be no rehearsal of anything, and more steps than a number of 32 bits can count.
_MOST_STEPS_SCALE = 1000
_HUB = "https://huggingface.co"
_HUB_S, _BATCH_S, _READING_S = 10.0, 60.0, 150.0


@dataclass(frozen=True, kw_only=True)
class Needs:
    """`lacks`: what is needed and not there, with what to do; `has`: what was looked at and is."""

    lacks: tuple[str, ...] = ()
    has: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Documents:
    """What a launch reads, as the loader's own command is asked for it."""

    dataset: str
    tokenizer: str
    tokenizer_file: str
    local_path: str

    @property
    def modules(self) -> list[str]:
        found = ["datasets"] if self.dataset == _OF_THE_HUB else []
        return [*found, "tiktoken"] if self.tokenizer == "gpt2" else found

    def words(self) -> list[str]:
        words = ["--batches", "1", "--timeout", f"{_BATCH_S:g}"]
        for name, value in vars(self).items():
            words += [f"--{name.replace('_', '-')}", value] if value else []
        return words

    def __str__(self) -> str:
        return " ".join(filter(None, (f"dataset {self.dataset}", self.local_path)))


def needs_of(setup: Setup) -> Needs:
    """What the planned launches of our trainer need and have, and lack; reads a batch of documents.

    Takes seconds where documents are read, and no time where all is generated.
    """
    launches = [launch for launch in setup.planned if launch.kind == "trainer"]
    configs = [(launch, config) for launch in launches if (config := config_of(setup, launch))]
    phases: dict[_Documents, dict[str, None]] = {}
    for launch, config in configs:
        dataset = option(launch.argv, DATASET_FLAG) or config.data.dataset
        if dataset in _READ:
            data = config.data
            read = _Documents(dataset, data.tokenizer, data.tokenizer_file, data.local_path)
            phases.setdefault(read, {})[launch.phase] = None
    lacks: list[str] = []
    has: list[str] = []
    for documents, names in phases.items():
        missing = list(_problems(documents))
        lacks += [f"{text} (planned in {', '.join(names)})" for text in missing]
        has += [] if missing else [f"{documents} was read, tokenizer {documents.tokenizer}"]
    room = _room(Path(setup.options.out), configs)
    return Needs(lacks=(*lacks, *room.lacks), has=(*without_board(setup.profile), *has, *room.has))


def without_board(profile: Profile) -> list[str]:
    """In a sentence, which phases of a plan go without TensorBoard, and why."""
    sources = {name: one.env.get(BOARD_TOGGLE) for name, one in profile.phases.items()}
    names = [name for name, one in sources.items() if one and one.source.startswith(NO_BOARD)]
    return [f"{', '.join(names)} {NO_BOARD} ({absent(BOARD)})"] if names else []


def _problems(documents: _Documents) -> Iterator[str]:
    """Why they cannot be read here, in words; nothing if a batch of them could."""
    missing = [module for module in documents.modules if not is_installed(module)]
    for module in missing:
        yield f"{documents}: {absent(module)}"
    problem = _hub_problem() if documents.dataset == _OF_THE_HUB else ""
    if problem:
        yield problem
    if missing or problem:
        return
    command = [sys.executable, "-P", "-m", "nsa.data.smoke", *documents.words()]
    read = run_tool(command, timeout_s=_READING_S)
    if not read.ok:
        lines = read.stderr.strip().splitlines()
        yield f"{documents} cannot be read: {lines[-1] if lines else read.problem}"


def _hub_problem() -> str:
    """Why the hub does not answer; any answer of it will do."""
    hub = os.environ.get("HF_ENDPOINT") or _HUB
    try:
        with urllib.request.urlopen(hub, timeout=_HUB_S):  # noqa: S310 - where datasets reads too
            return ""
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        return (
            f"{hub} does not answer ({why}): check the network, the proxy and HF_ENDPOINT, or read "
            "files (data.dataset local, data.local_path)"
        )


def _room(out: Path, configs: Sequence[tuple[Launch, TrainerConfig]]) -> Needs:
    """Is there room for every checkpoint that the launches leave?"""
    sizes = [
        checkpoint_gib(_parameters(config))
        for launch, config in configs
        for _ in range(_kept(launch, config))
    ]
    if not sizes:
        return Needs()
    needed = sum(sizes) * DISK_MARGIN
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free / 1024**3
    text = f"checkpoints: {needed:.2g} GiB for {len(sizes)}, {free:.3g} GiB are free in {out}/"
    if needed <= free:
        return Needs(has=(text,))
    return Needs(lacks=(f"{text}: free space there, or name another disk (--out)",))


def _kept(launch: Launch, config: TrainerConfig) -> int:
    """Checkpoints that a launch leaves: one at its end, those of its cadence, at most keep_last."""
    every, keep = config.train.save_every, config.train.keep_last
    count = (launch.steps - launch.after) // every if every else 0
    return max(min(count, keep) if keep else count, int("--save" in launch.argv))


def _parameters(config: TrainerConfig) -> int:
    size = VOCAB_SIZES[config.data.tokenizer]
    return parameters({"config": config.model_dump(), "effective": {"vocab_size": size}})


def prepare(options: RunOptions) -> Setup:
    """Resolve the options and plan every phase, which starts nothing.

    Raises `UsageError` with everything that is wrong with the options; only sound ones are planned,
    and then with every contradiction in a planned launch.
    """
    problems = _not_text(options)
    profile, settings, preset, phases, refused = None, None, None, None, ""
    with _told(problems):
        named = options.profile != "auto"
        profile = load_profile(options.profile if named else detect_profile()[0])
    with _told(problems):
        settings = parse_settings(options.settings)
    with _told(problems):
        preset = load_preset(options.preset) if options.preset else None
    if profile and settings:
        with _told(problems):
            settings = gathered(profile, settings, from_shell=options.from_shell, preset=preset)
        profile = with_config(profile, settings.config)
        if options.plan:
            # A GO is asked for only once the rest is right: it has to be one of these settings.
            standing = options if not problems else replace(options, without_go=True)
            with _told(problems):
                profile, refused = planned_profile(standing, profile, settings, run_problem)
                names = ",".join(asked_for(profile, options.until))
                options, phases = replace(options, phases=names), select(names, profile.phases)
    if not options.plan:
        with _told(problems):
            phases = select(options.phases, profile.phases if profile else {})
    if profile:
        with _told(problems):
            problems += launcher(options.launcher).problems(options, profile)
        problems += phase_problems(profile, phases or ())
    if options.protocol not in PROTOCOLS:
        problems.append(
            f"--protocol {options.protocol!r}: no such protocol"
            f"{choice_for(options.protocol, PROTOCOLS)}"
        )
    if phases is not None:
        with _told(problems):
            options = _with_commits(options, phases)
    if not 0 < options.steps_scale <= _MOST_STEPS_SCALE:
        allowed = f"expected a number above 0, at most {_MOST_STEPS_SCALE}"
        problems.append(f"--steps-scale {options.steps_scale:g}: {allowed}")
    if problems or profile is None or settings is None or phases is None:
        raise UsageError(problems)
    setup = Setup(
        options=replace(options, settings=settings.words()),
        profile=profile,
        settings=settings,
        phases=tuple(phases),
        refused=refused,
        package=package_under_test(),
        package_path=str(package_folders()["nsa"]),
    )
    if problems := planned_problems(setup):
        raise UsageError(problems)
    return setup


def run_problem(options: RunOptions) -> str:
    """The first thing for which a run with these options is refused; empty if it would start."""
    try:
        prepare(options)
    except UsageError as error:
        return error.problems[0]
    return ""


@contextmanager
def _told(problems: list[str]) -> Iterator[None]:
    """What is refused within becomes some of the problems, and the next thing is looked at."""
    try:
        yield
    except UsageError as error:
        problems += [f"{text}; {error.hint}" if error.hint else text for text in error.problems]


def _not_text(options: RunOptions) -> list[str]:
    """Words that no file of the run could repeat."""
    named = {**vars(options), "command": ""}  # the command repeats all of them
    given = [str(value) for value in named.values() if isinstance(value, str | Path)]
    given += [*options.settings, *(f"{name}={value}" for name, value in options.from_shell.items())]
    return [f"{text!r} {why}" for text in given if (why := not_text(text))]


def _with_commits(options: RunOptions, phases: Sequence[Phase]) -> RunOptions:
    """The options with both commits in full. Raises UsageError for those that are not there.

    Without a phase that compares commits they stay as named: the command that runs another phase
    of the same run again names them too.
    """
    comparing = [phase.name for phase in phases if phase.compares_commits]
    if not comparing:
        return options
    checkout = git.find_checkout()
    if checkout is None:
        raise UsageError(f"phase {comparing[0]} needs a git checkout; there is none here")
    if not options.reference:
        raise UsageError(f"phase {comparing[0]} needs --reference COMMIT to compare with")
    named = {"reference": options.reference, "head": options.head or "HEAD"}
    found = {flag: git.commit_of(checkout, name) or "" for flag, name in named.items()}
    if missing := [f"--{flag} {named[flag]}" for flag, sha in found.items() if not sha]:
        why = f"no such commit in {checkout}; a shallow clone lacks older ones"
        raise UsageError([f"{text}: {why}" for text in missing])
    return replace(options, reference=found["reference"], head=found["head"])
