"""A profile that fits into the time there is: the same run, with fewer steps where it must be.

Nothing is left out and no limit is changed. What was cut is in the profile that is written, and the
verdict's first line names it, since the profile keeps the name of the shipped one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runbook.config import Profile
from runbook.records import Launch

# Not the rounds of a comparison: it ends by itself when it is decided, and fused AdamW is kept only
# after all of them, so that with fewer no run on a GPU could end with GO.
_CUT = ("steps", "single_steps", "launches", "warmup", "retry_steps", "profile_steps")
_TRIES = 20
# Parity and other tests start no trainer; preflight collects besides.
_TESTS_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured on this device: seconds of a step, and of a launch besides its steps."""

    step_s: float
    start_s: float

    def seconds(self, launches: Sequence[Launch]) -> float:
        """What these launches take at this pace."""
        return sum(
            self.start_s + launch.steps * self.step_s if launch.kind == "trainer" else _TESTS_S
            for launch in launches
        )


@dataclass(frozen=True, kw_only=True)
class Shortened:
    """How far a profile was cut: `share` 1 is all of it, 0 the least that can be judged."""

    profile: Profile
    share: float
    changes: Mapping[str, Mapping[str, int]]
    seconds: float
    whole_s: float

    def document(self, extends: str, phases: Sequence[str]) -> dict[str, Any]:
        """The profile file: what it extends, and what differs."""
        source = (
            f"shortened to {self.share:.0%} of the way between what profile cpu runs and the whole"
        )
        changed = {n: {**values, "source": source} for n, values in self.changes.items()}
        document: dict[str, Any] = {"extends": extends, "phases": changed}
        if phases:
            document["required"] = list(self.profile.required)
        return document

    def described(self) -> str:
        """What was cut, for people."""
        if not self.changes:
            return f"nothing was cut: about {self.whole_s:.0f} s"
        texts = [
            f"{name} {', '.join(f'{key}={value}' for key, value in values.items())}"
            for name, values in self.changes.items()
        ]
        return f"cut from about {self.whole_s:.0f} s to {self.seconds:.0f} s: {'; '.join(texts)}"


def shorten(
    profile: Profile,
    least: Profile,
    *,
    phases: Sequence[str],
    pace: Pace,
    fit_s: float,
    plan: Callable[[Profile], Sequence[Launch]],
) -> Shortened:
    """The longest profile between `least` and `profile` whose plan takes at most `fit_s` seconds.

    `least` says what each phase can still be judged with; where even that takes longer, it is what
    comes back. `phases` (empty: all) are the ones that run: checks of others are not required then.
    """
    if phases:
        kept = tuple(name for name in profile.required if name.partition(".")[0] in phases)
        profile = profile.model_copy(update={"required": kept})
    whole_s = pace.seconds(plan(profile))

    def cut(share: float) -> Shortened:
        changes = _changes(profile, least, share)
        changed = profile.model_copy(
            update={
                "phases": profile.phases
                | {n: profile.phases[n].model_copy(update=v) for n, v in changes.items()}
            }
        )
        seconds = pace.seconds(plan(changed))
        return Shortened(
            profile=changed, share=share, changes=changes, seconds=seconds, whole_s=whole_s
        )

    tries = [cut(number / _TRIES) for number in range(_TRIES, -1, -1)]
    return next((one for one in tries if one.seconds <= fit_s), tries[-1])


def _changes(profile: Profile, least: Profile, share: float) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name, settings in profile.phases.items():
        floor = least.phases.get(name)
        if floor is None or share == 1.0:
            continue
        values = {}
        for key in _CUT:
            whole, smallest = getattr(settings, key), getattr(floor, key)
            if not whole or not smallest or smallest >= whole:
                continue
            value = round(smallest + share * (whole - smallest))
            if value != whole:
                values[key] = value
        if values:
            found[name] = values
    return found
