"""All phases, in running order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from phases.baseline import Baseline
from phases.bucket_sweep import BucketSweep
from phases.common.rows import RowPhase
from phases.fineweb import FineWeb
from phases.fused_adamw import FusedAdamW
from phases.long_run import LongRun
from phases.nvtx import Nvtx
from phases.preflight import Preflight
from phases.sdpa_audit import SdpaAudit
from phases.single_gpu import SingleGpu
from phases.v2_parity import V2Parity
from runbook.errors import UsageError, did_you_mean
from runbook.records.phase import Phase, PlanContext

if TYPE_CHECKING:
    from runbook.config.profile import Profile


def register(phases: Iterable[Phase]) -> dict[str, Phase]:
    """Phases by name, in the given order. Raises ValueError if a name comes twice."""
    table: dict[str, Phase] = {}
    for phase in phases:
        if phase.name in table:
            raise ValueError(f"two phases are called {phase.name!r}")
        unknown = [name for name in phase.reads if name not in table]
        if unknown:
            raise ValueError(f"{phase.name} reads {', '.join(unknown)}, which do not run before it")
        table[phase.name] = phase
    return table


PHASES: dict[str, Phase] = register(
    (
        Preflight(),
        Baseline(),
        BucketSweep(),
        SdpaAudit(),
        V2Parity(),
        Nvtx(),
        SingleGpu(),
        FusedAdamW(),
        LongRun(),
        FineWeb(),
    )
)


def select(text: str) -> list[Phase]:
    """Phases of `all` (the nine), of `a,b`, or of `all,fineweb`, in running order.

    Raises UsageError that lists every unknown, empty or repeated name.
    """
    names = [name.strip() for name in text.split(",")]
    nine = [name for name, phase in PHASES.items() if not phase.optional]
    if "all" in names:
        names = [*nine, *(name for name in names if name != "all" and name not in nine)]
    problems = [
        f"no phase {name!r}{did_you_mean(name, PHASES)}; there are: all, {', '.join(PHASES)}"
        for name in dict.fromkeys(names)
        if name not in PHASES
    ]
    problems += [f"phase {name!r} is named twice" for name in PHASES if names.count(name) > 1]
    if problems:
        raise UsageError(problems)
    return [phase for name, phase in PHASES.items() if name in names]


def known_limits() -> tuple[str, ...]:
    """Names of all limits that a profile has to set, in the order of the phases."""
    found = [
        limit for phase in PHASES.values() if isinstance(phase, RowPhase) for limit in phase.limits
    ]
    return tuple(dict.fromkeys(found))


def known_checks(profile: Profile) -> tuple[str, ...]:
    """Ids of all checks that the phases of this profile can give."""
    context = PlanContext(profile=profile)
    return tuple(
        check
        for name, phase in PHASES.items()
        if name in profile.phases
        for check in phase.check_ids(context)
    )
