"""Is gradient compression on: the trainer's proof and the line that the seeds look for."""

from __future__ import annotations

from collections.abc import Sequence

from nsa.contract import COMPRESSION_LINE
from phases.common.case import Case
from phases.common.effects import effect_problem, proof_text
from phases.common.finding import Finding, invalid, passed, skipped
from phases.common.measure import rank_value
from phases.common.training import first_problem
from runbook.records import Reason

__all__ = ["compression_active"]

_TOGGLE = "NSA_DDP_COMPRESS"


def compression_active(case: Case, names: Sequence[str]) -> Finding:
    """PASS if every launch proves it and logs `[ddp] gradient compression enabled: TYPE`."""
    return first_problem(_active, case, names)


def _active(case: Case, name: str) -> Finding:
    launch = case.completed(name)
    wanted = launch.launch.env.get(_TOGGLE, "off")
    if wanted == "off":
        return skipped(Reason.NOT_ASKED_FOR, f"{name} was planned with {_TOGGLE}=off")
    line = f"{COMPRESSION_LINE}{wanted}"
    problems = [effect_problem(launch, _TOGGLE, wanted)]
    if not any(line in text for text in launch.console_lines):
        problems.append(f"the log has no line {line!r}")
    found = [problem for problem in problems if problem]
    paths = (launch.console_path, *(rank.path for rank in launch.ranks[:1]))
    if found:
        return invalid(Reason.NO_EFFECT, f"{name}: {'; '.join(found)}", evidence=paths)
    proof = next(effect for effect in launch.effects(_TOGGLE) if effect.took_effect)
    value = rank_value(launch.ranks[0], "gradient_compression", wanted)
    return passed(
        f"{line!r} logged; {proof_text(proof.evidence)}", measurement=value, evidence=paths
    )
