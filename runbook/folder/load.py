"""How much of the machine other work took while launches ran, from their `load.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_NUMBERS = ("cpus", "total_s", "others_s", "steal_s")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Shares of all CPUs over the launches: of other processes, and of other machines on this host.

    `highest` is the highest load average of a minute, at the start or the end of a launch.
    """

    cpus: int
    others: float
    steal: float
    highest: float

    @property
    def taken(self) -> float:
        """The share of the CPUs that this launch could not have."""
        return self.others + self.steal

    def short_of(self, ranks: int) -> float:
        """CPUs beyond those there are that so many ranks, each with one to itself, would need."""
        return max(0.0, self.taken * self.cpus + ranks - self.cpus)

    def __str__(self) -> str:
        return (
            f"other work took {self.others:.1%} of {self.cpus} CPUs, the host {self.steal:.1%}; "
            f"load average up to {self.highest:.1f}"
        )


def load_of(documents: Iterable[Mapping[str, Any] | None]) -> Load | None:
    """The load over all launches whose document tells it; None where none does."""
    told = [one for one in documents if one is not None and _is_whole(one)]
    total_s = sum(float(one["total_s"]) for one in told)
    if not told or total_s <= 0:
        return None
    loads = [float(value) for one in told for value in _averages(one)]
    return Load(
        cpus=int(told[-1]["cpus"]),
        others=sum(float(one["others_s"]) for one in told) / total_s,
        steal=sum(float(one["steal_s"]) for one in told) / total_s,
        highest=max(loads, default=0.0),
    )


def _is_whole(document: Mapping[str, Any]) -> bool:
    return not document.get("problem") and all(
        document.get(name) is not None and document[name] >= 0 for name in _NUMBERS
    )


def _averages(document: Mapping[str, Any]) -> list[float]:
    """The load averages of the last minute, before and after."""
    both = (document.get("load_before") or (), document.get("load_after") or ())
    return [values[0] for values in both if values]
