"""A profile for a trainer of one's own, from a probe of a few seconds and what its files say."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.config import Profile, registry
from runbook.config.extends import merged
from runbook.config.load import load_profile, load_profile_document
from runbook.errors import UsageError
from runbook.files import page
from runbook.folder import CONSOLE_LOG
from runbook.folder.launch.documents import read_console
from runbook.folder.launch.evidence import read_launch
from runbook.launch import LaunchOptions, StopRequest, run_launch
from runbook.launch.end import last_words
from runbook.launch.observer import Observer
from runbook.records import Launch, LaunchResult, LaunchStatus
from runbook.records.evidence import LaunchEvidence
from runbook.records.own_trainer import (
    OUT,
    OWN_PACE_TOLERANCE,
    PACE,
    RANKS,
    STEPS,
    LogMap,
    OwnTrainer,
    for_own,
)
from runbook.text import how_many
from runbook.tools.own_rows import guess

if TYPE_CHECKING:
    import pandas as pd

_FLAGS = {
    STEPS: r"(?:max|num|train|total)?[-_]?(?:train[-_])?(?:steps|iters|iterations|updates)",
    RANKS: r"nproc[-_]per[-_]node|num[-_]processes|ranks|world[-_]size|devices|gpus",
    OUT: r"(?:output|out|save|log|run|results?)(?:[-_]?(?:dir|path|folder))?|logdir",
}


def templated(command: str) -> str:
    """The command with marks in the place of its steps, its ranks and its folder.

    Raises UsageError where nothing says how many steps it trains.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--trainer: {error}") from error
    for mark, flag in _FLAGS.items():
        if mark not in command:
            words = _marked(words, flag, mark)
    if not any(STEPS in word for word in words):
        raise UsageError(
            f"--trainer: nothing in it says how many steps it trains; put {STEPS} there, such as "
            f"'train.py --max_steps {STEPS}'"
        )
    return shlex.join(words).replace(f"'{STEPS}'", STEPS).replace(f"'{OUT}'", OUT)


def _marked(words: Sequence[str], flag: str, mark: str) -> list[str]:
    changed = list(words)
    for place, word in enumerate(words):
        found = re.fullmatch(rf"((?:--?)?(?:\w+\.)?(?:{flag}))(=.*)?", word)
        if found is None:
            continue
        if found[2]:
            changed[place] = f"{found[1]}={mark}"
            break
        if word.startswith("-") and place + 1 < len(words):
            changed[place + 1] = mark
            break
    return changed


_LEAST = {"baseline": (60, 8.0), "single_gpu": (60, 8.0), "long_run": (200, 30.0)}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe showed: the trainer with its map, how long a step took, what to say of it."""

    trainer: OwnTrainer
    step_s: float
    startup_s: float
    ranks_seen: tuple[int, ...]
    notes: tuple[str, ...]


def run_probe(
    trainer: OwnTrainer,
    *,
    ranks: int,
    steps: int,
    seconds: float,
    folder: Path,
    variables: Mapping[str, str],
    stop: StopRequest,
) -> Probe:
    """Run the trainer twice for some steps: to find its rows, and to read them as a run would.

    `variables` are those that the launches of a run get: how many threads it has decides its pace.
    Raises UsageError with its last words if it ends badly, or within `seconds` not at all.
    """

    def run(name: str, trainer: OwnTrainer) -> LaunchEvidence:
        launch = Launch(
            name=name,
            phase="init",
            kind="own",
            argv=trainer.argv(ranks=ranks, steps=steps),
            env={**for_own(variables), **trainer.env},
            run_dir=name,
            nproc=ranks,
            steps=steps,
            timeout_s=seconds,
            own=trainer,
        )
        options = LaunchOptions(run_root=folder, observer=Observer(), stop=stop, retry=False)
        result = run_launch(launch, options)
        if result.status is not LaunchStatus.COMPLETED:
            raise UsageError(_bad_end(result, folder / name / CONSOLE_LOG))
        return read_launch(folder, launch, result)

    run("found", trainer)
    log, said = guess(folder / "found", steps=steps, pattern=trainer.log.pattern)
    return _measured(said, run("read", trainer.model_copy(update={"log": log})))


def _bad_end(result: LaunchResult, console: Path) -> str:
    said = f"{result.status.words}: {result.cause or last_words(read_console(console)[0])}"
    return (
        f"the probe {said}; what it printed is in {console}, what helps in {page('your-trainer')}"
    )


def _measured(said: str, evidence: LaunchEvidence) -> Probe:
    trainer, log = evidence.launch.own, evidence.training
    assert trainer is not None  # noqa: S101 - by its launch
    if log is None or log.damaged or len(log.frame) < 2:
        why = "; ".join(evidence.problems) or "they all came together"
        raise UsageError(
            f"{said}, but no pace follows from them: {why}; "
            "the trainer has to write each row at once (flush), or take more steps (--steps)"
        )
    rows = log.frame.iloc[1:]
    seconds, told_s = float(rows["dt_s"].sum()), float(rows["told_s"].sum())
    notes = [f"log: {said}"]
    told, odd = next((name for name in PACE if name in trainer.log.names), ""), ""
    if told and not abs(told_s / seconds - 1.0) <= OWN_PACE_TOLERANCE:
        odd = f"by which the steps took {told_s:.2f} s, not {seconds:.2f} s"
    elif told and is_running_mean(log.frame):
        odd = "a mean since the first step by this program's clock, and not of the steps of a row"
    if odd:
        notes.append(f"left out: its {told}, {odd}")
        trainer = trainer.model_copy(update={"log": _without(trainer.log, told)})
    ranks = set() if evidence.processes is None else set(evidence.processes["rank"].tolist())
    ranks |= {rank for rank, step in evidence.last_steps.items() if step is not None}
    return Probe(
        trainer=trainer,
        step_s=max(seconds / float(rows["steps"].sum()), 1e-4),
        startup_s=max(evidence.result.duration_s - seconds, 1.0),
        ranks_seen=tuple(sorted(rank for rank in ranks if rank >= 0)),
        notes=tuple(notes),
    )


def is_running_mean(frame: pd.DataFrame) -> bool:
    """Does the pace that a log tells explain this program's clock far better as such a mean?

    At a steady pace both explain it.
    """
    apart = {
        name: float((frame[name] - frame["dt_s"]).iloc[1:].abs().sum())
        for name in ("told_s", "told_as_mean_s")
    }
    return apart["told_as_mean_s"] < apart["told_s"] / 2


def _without(log: LogMap, name: str) -> LogMap:
    if log.pattern:
        return log.model_copy(update={"pattern": log.pattern.replace(f"(?P<{name}>", "(?:")})
    kept = {ours: theirs for ours, theirs in log.columns.items() if ours != name}
    return log.model_copy(update={"columns": kept})


def document_of(probe: Probe, *, base: str, ranks: int) -> dict[str, Any]:
    """The profile's file: what differs from the base. Raises UsageError if it is not sound."""
    trainer, name = probe.trainer, re.sub(r"\W+", "_", probe.trainer.name).lower()
    below = load_profile(base).model_dump(mode="json")
    document: dict[str, Any] = {
        "extends": base,
        "name": name,
        "title": f"{trainer.name} on {how_many(ranks, 'rank')}",
        "ranks": ranks,
        "branch": None,
        "throughput_gated": False,
        "trainer": trainer.model_dump(mode="json", exclude_defaults=True),
        "phases": _phases(probe, below["phases"]),
        "required": ["baseline.completed"],
    }
    profile = _loaded(document, below)
    document["required"] = _required(profile, probe, below["required"], ranks)
    _loaded(document, below)
    return document


def _loaded(document: Mapping[str, Any], below: Mapping[str, Any]) -> Profile:
    own = ("extends", "trainer")
    whole = merged(below, {key: value for key, value in document.items() if key not in own})
    whole |= {"own_trainer": document["trainer"], "trainer": below["trainer"]}
    return load_profile_document(whole, where="the profile that follows from the probe")


def _phases(probe: Probe, below: Mapping[str, Any]) -> dict[str, Any]:
    """Steps enough to be timed at the pace that was seen, and time enough for three times that."""
    phases = {}
    for name, (least, seconds) in _LEAST.items():
        steps = max(least, math.ceil(seconds / probe.step_s))
        typical = probe.startup_s + steps * probe.step_s
        phases[name] = {
            "steps": steps,
            "timeout_s": max(float(below[name]["timeout_s"]), math.ceil(3 * typical)),
            "typical_s": round(typical, 1),
            "source": f"a probe at {probe.step_s:.3g} s a step",
        }
    return phases


def _required(profile: Profile, probe: Probe, below: Sequence[str], ranks: int) -> list[str]:
    """What the base requires and this trainer can answer, by what the probe showed."""
    answered = set(registry.own_checks(profile))
    told = any(name in probe.trainer.log.names for name in PACE)
    unknown = set()
    if not told:
        unknown |= {name for name in answered if name.endswith(".accounts")}
    if ranks > 1 and set(probe.ranks_seen) != set(range(ranks)):
        unknown |= {name for name in answered if name.endswith(".ranks_alive")}
    if RANKS not in probe.trainer.command:
        unknown |= {name for name in answered if name.startswith("single_gpu.")}
    return [name for name in below if name in answered - unknown]
