"""How a run was asked for, and the command line that asks for it again.

Every `runbook run` line that is printed (a row's rerun, a remedy, the dry run's) is made here, so
that none drops a setting and starts another experiment.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from runbook.records.measurement import Scalar

DEFAULT_OUT = "artifacts"
# How arms are compared; the first is the default.
PROTOCOLS = ("blocks", "launches", "single")
DEFAULT_PROTOCOL = PROTOCOLS[0]


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Everything of a `runbook run` that changes what is measured or where it goes.

    `profile` is a name, or the path of a file; a path is kept absolute, since the line may be
    pasted anywhere. `settings` are `KEY=VALUE` words.
    """

    profile: str
    settings: tuple[str, ...] = ()
    out: str | Path = DEFAULT_OUT
    protocol: str = DEFAULT_PROTOCOL
    steps_scale: float = 1.0
    aa: bool = False
    seed: int = 0
    gpu_hour_price: float | None = None

    @classmethod
    def recorded(
        cls, profile: str, settings: Mapping[str, str], options: Mapping[str, Scalar | None]
    ) -> Invocation:
        """The invocation of a run from its record: profile name, settings and options."""
        price = options.get("gpu_hour_price")
        return cls(
            profile=str(options.get("profile") or profile),
            settings=tuple(f"{name}={value}" for name, value in settings.items()),
            out=str(options.get("out") or DEFAULT_OUT),
            protocol=str(options.get("protocol") or DEFAULT_PROTOCOL),
            steps_scale=float(options.get("steps_scale") or 1.0),
            aa=bool(options.get("aa")),
            seed=int(options.get("seed") or 0),
            gpu_hour_price=None if price is None else float(price),
        )

    def options(self) -> dict[str, str | int | float | bool | None]:
        """The part that run.json keeps under `options`; the settings have a place of their own."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def line(self, phases: Iterable[str]) -> str:
        """The command that runs these phases in the same way; it leaves out what is default."""
        words = ["runbook", "run", "--phase", ",".join(phases), "--profile", self.profile]
        words += [word for setting in self.settings for word in ("--set", setting)]
        changed = {
            "--protocol": (self.protocol, DEFAULT_PROTOCOL),
            "--steps-scale": (f"{self.steps_scale:g}", "1"),
            "--seed": (str(self.seed), "0"),
            "--out": (str(self.out), DEFAULT_OUT),
        }
        for flag, (value, default) in changed.items():
            words += [flag, value] if value != default else []
        if self.gpu_hour_price is not None:
            words += ["--gpu-hour-price", f"{self.gpu_hour_price:g}"]
        return shlex.join([*words, *(["--aa"] if self.aa else [])])


def lasting(path: str | Path) -> str:
    """A path that works wherever the line is pasted; the default folder stays as it is."""
    return str(path) if str(path) == DEFAULT_OUT else str(Path(path).absolute())
