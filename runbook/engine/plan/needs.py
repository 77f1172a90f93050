"""What the launches of a run need besides the program, looked at before any of them starts.

Packages of the extras, the hub, documents that can be read, and room for the checkpoints. What is
generated needs none of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.settings import VOCAB_SIZES, TrainerConfig
from runbook import BOARD_TOGGLE, absent, is_installed
from runbook.accounts.first_weights import DISK_MARGIN, checkpoint_gib, parameters
from runbook.config.plan import phases_without_board
from runbook.engine.plan import config_of
from runbook.process import run_tool
from runbook.records import Launch
from runbook.records.launch import DATASET_FLAG, option

if TYPE_CHECKING:
    from runbook.config.profile import Profile
    from runbook.config.setup import Setup

_OF_THE_HUB = "fineweb_edu"
_READ = (_OF_THE_HUB, "local")
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
        words = ["--dataset", self.dataset, "--tokenizer", self.tokenizer]
        words += ["--tokenizer-file", self.tokenizer_file] if self.tokenizer_file else []
        words += ["--local-path", self.local_path] if self.local_path else []
        return [*words, "--batches", "1", "--timeout", f"{_BATCH_S:g}"]

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
    if not (names := phases_without_board(profile)):
        return []
    (source,) = {profile.phases[name].env[BOARD_TOGGLE].source for name in names}
    return [f"{', '.join(names)} {source}"]


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
