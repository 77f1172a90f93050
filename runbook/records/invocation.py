"""How a run was asked for, and every `runbook run` line that asks for it again.

A row's rerun, a remedy, the dry run's: they are all made here, so that none drops a setting and
starts another experiment.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runbook import DEFAULT_LAUNCHER, DEFAULT_OUT, DEFAULT_PLAN, DEFAULT_PROTOCOL, DEFAULT_QUEUE_S

# Options in the order in which a command has them.
_PRINTED = (
    *("protocol", "steps_scale", "seed", "out", "reference", "head", "launcher", "nodes"),
    *("partition", "account", "queue_s", "gpu_hour_price"),
)
_OF_A_CLUSTER = ("launcher", "nodes", "partition", "account", "queue_s")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What of an invocation a phase plans and judges with.

    `steps_scale` multiplies every step count. `gpu_hour_price` is the price of one device for one
    hour, in any currency. `reference` and `head` are commits. The ranks are spread over `nodes`.
    """

    protocol: str = DEFAULT_PROTOCOL
    steps_scale: float = 1.0
    aa: bool = False
    seed: int = 0
    gpu_hour_price: float | None = None
    reference: str = ""
    head: str = ""
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class Invocation(Asked):
    """Everything of a `runbook run` that changes what is measured or where it goes.

    `profile` is a name, or the path of a file; a path is kept absolute, since the line may be
    pasted anywhere. `settings` are `KEY=VALUE` words. `plan`, a name or the path of a file, makes
    it a `runbook launch`, with `without_go`. `launcher` is where launches run: on this machine, or
    on nodes of a cluster, of which the last three and `nodes` speak.
    """

    profile: str
    settings: tuple[str, ...] = ()
    out: str | Path = DEFAULT_OUT
    plan: str = ""
    without_go: bool = False
    launcher: str = DEFAULT_LAUNCHER
    partition: str = ""
    account: str = ""
    queue_s: float = DEFAULT_QUEUE_S

    def options(self) -> dict[str, str | int | float | bool | None]:
        """The part that run.json keeps under `options`; the settings have a place of their own."""
        kept = {name: value for name, value in asdict(self).items() if name != "settings"}
        # A run that follows no plan says nothing of plans, one on this machine nothing of clusters.
        unsaid = [name for name in ("plan", "without_go") if not kept[name]]
        unsaid += _OF_A_CLUSTER if self.launcher == DEFAULT_LAUNCHER else ()
        return {name: value for name, value in kept.items() if name not in unsaid}

    def adding(self, settings: Iterable[str]) -> Invocation:
        """The same with these `KEY=VALUE` words, in the place of what was given by that name."""
        more = tuple(settings)
        names = {text.partition("=")[0] for text in more}
        kept = [text for text in self.settings if text.partition("=")[0] not in names]
        return replace(self, settings=(*kept, *more))

    def line(self, phases: Iterable[str] = ()) -> str:
        """The command that runs these phases in the same way, or all; it leaves out defaults.

        A plan is run from its beginning: a phase of it means nothing without those before it.
        """
        words = [*self.program, *self._named(phases), "--profile", self.profile]
        if self.plan:
            words += [] if self.plan == DEFAULT_PLAN else ["--plan", self.plan]
            words += ["--without-go"] if self.without_go else []
        words += [word for setting in self.settings for word in ("--set", setting)]
        plain = Invocation(profile=self.profile)
        for name in _PRINTED:
            value, default = (_text(getattr(one, name)) for one in (self, plain))
            words += [f"--{name.replace('_', '-')}", value] if value != default else []
        return shlex.join([*words, *(["--aa"] if self.aa else [])])

    def _named(self, phases: Iterable[str]) -> list[str]:
        """The words that name these phases; none of all."""
        named = list(phases)
        if not named:
            return []
        return ["--until", named[-1]] if self.plan else ["--phase", ",".join(named)]

    def production_line(self) -> str:
        """The launch by the shipped plan that starts production behind a GO of this run."""
        plain = Invocation(profile=self.profile)
        asked = replace(self, plan=DEFAULT_PLAN, protocol=plain.protocol, aa=plain.aa)
        return replace(asked, seed=plain.seed, reference="", head="").line()

    @property
    def program(self) -> tuple[str, str]:
        """The command that begins such a run, and goes on with it."""
        return ("runbook", "launch" if self.plan else "run")

    def resume_line(self, run_id: str, phases: Iterable[str] = ()) -> str:
        """The command that goes on with this run, or adds phases to it."""
        words = [*self.program, "--resume", run_id, *self._named(phases)]
        words += [] if str(self.out) == DEFAULT_OUT else ["--out", str(self.out)]
        return shlex.join(words)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def edited(line: str, *, without: Iterable[str]) -> str:
    """A printed line of an invocation without these settings.

    A line in which there is nothing to change, or that is none, stays as it is.
    """
    try:
        whole = shlex.split(line)
    except ValueError:
        return line
    names, words, kept = set(without), iter(whole), []
    for word in words:
        value = next(words, "") if word == "--set" else ""
        if word != "--set":
            kept.append(word)
        elif value.partition("=")[0] not in names:
            kept += [word, value]
    return line if kept == whole else shlex.join(kept)


def lasting(path: str | Path) -> str:
    """A path that works wherever the line is pasted; the default folder stays as it is."""
    return str(path) if str(path) == DEFAULT_OUT else str(Path(path).absolute())
