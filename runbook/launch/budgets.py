"""How long a rank may say nothing, by what it is doing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa.contract import Phase
from runbook.records import Launch

__all__ = ["Budgets"]

_STALL_TOGGLE = "NSA_WATCH_HEARTBEAT_STALL_S"
_LEARNED_FACTOR = 5.0


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Seconds without a sign of life that mean a hang, for each phase of a rank.

    One flat number gives false alarms in every healthy run: a first step compiles, a checkpoint
    writes. The 180 s of an ordinary step are the watchdog's default in the seeds. `silence_s` is
    for a launch that prints nothing and has no heartbeat at all.
    """

    init_s: float = 300.0
    first_step_s: float = 600.0
    data_s: float = 180.0
    step_s: float = 180.0
    eval_s: float = 600.0
    checkpoint_s: float = 600.0
    exit_s: float = 60.0
    silence_s: float = 300.0

    @classmethod
    def for_launch(cls, launch: Launch) -> Budgets:
        """The defaults; `NSA_WATCH_HEARTBEAT_STALL_S` of the launch sets step and data."""
        text = launch.env.get(_STALL_TOGGLE, "")
        try:
            stall_s = float(text)
        except ValueError:
            return cls()
        return replace(cls(), step_s=stall_s, data_s=stall_s) if stall_s > 0 else cls()

    def of_phase(self, phase: str, *, longest_step_s: float = 0.0) -> float:
        """The budget of a rank's phase; an unknown phase has that of a step.

        A step may always take five times as long as the longest one seen in this launch.
        """
        budgets: dict[str, float] = {
            Phase.INIT: self.init_s,
            Phase.FIRST_STEP: self.first_step_s,
            Phase.DATA: self.data_s,
            Phase.EVAL: self.eval_s,
            Phase.CHECKPOINT: self.checkpoint_s,
            Phase.EXIT: self.exit_s,
        }
        if phase in budgets:
            return budgets[phase]
        return max(self.step_s, _LEARNED_FACTOR * longest_step_s)
