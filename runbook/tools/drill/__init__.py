"""Fire drills: the faults that can be injected on one machine, and what counts as noticing each.

They are in `configs/drill/faults.yaml`: a new one is one entry there. `nsa.inject`, which runs
inside the ranks and is started by name, does them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ConfigDict, TypeAdapter

from runbook.errors import UsageError, did_you_mean
from runbook.files import shipped_data
from runbook.records import LaunchStatus

BUDGET_S = 3.0
# After a budget is over: evidence, end, verdict. A crash has no budget, only this (and 2 s).
MARGIN_S = 2.0


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what is injected where, and what the harness must say.

    The fields are those of the file, explained there. `threshold_s` is the budget of the phase it
    is injected in, 0 where the kernel tells at once. `culprit` None means that no rank may be
    blamed.
    """

    name: str
    title: str
    inject: str = "none"
    rank: int = 1
    step: int = 6
    steps: int = 2000
    status: LaunchStatus = LaunchStatus.CRASHED
    or_status: LaunchStatus | None = None
    culprit: int | None = 1
    cause: str = ""
    threshold_s: float = 0.0
    late_s: float = 0.0
    evidence: tuple[str, ...] = ()
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    budgets: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    scene: str = "launch"
    note: str = ""

    @property
    def limit_s(self) -> float:
        """Seconds from injection to the verdict, everything dead, that are good enough."""
        return self.threshold_s + MARGIN_S + self.late_s


def _faults() -> dict[str, Fault]:
    document = shipped_data("drill/faults")
    kinds = document["kinds"]
    whole = {
        name: {"name": name, **kinds[one["like"]], **{k: v for k, v in one.items() if k != "like"}}
        for name, one in document["faults"].items()
    }
    adapter = TypeAdapter(dict[str, Fault], config=ConfigDict(extra="forbid"))
    return adapter.validate_python(whole)


FAULTS = _faults()


def select(text: str) -> list[Fault]:
    """The faults that a comma-separated list names; `all` is every one.

    Raises `UsageError` that lists every unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--faults names none", hint=f"known are: all, {', '.join(FAULTS)}")
    if "all" in names:
        return list(FAULTS.values())
    wrong = [f"unknown fault {n!r}{did_you_mean(n, FAULTS)}" for n in names if n not in FAULTS]
    if wrong:
        raise UsageError(wrong, hint=f"known are: all, {', '.join(FAULTS)}")
    return [FAULTS[name] for name in dict.fromkeys(names)]
