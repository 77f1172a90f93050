"""What a rank did between the ends of two steps besides the step: only what its plan asks for.

Both clocks of a launch leave such steps out, so that the time in them is nobody's throughput.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsa.contract import Event
from nsa.contract.sampling import recomputed_steps
from runbook.read.clocks import with_clock
from runbook.read.documents import recorded_toggles
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# Steps that a thing of this kind may be beside, each time that it is asked for: what begins in one
# step may end in the next.
_ASKED = {
    Event.EVAL_START: "train.eval_every",
    Event.EVAL: "train.eval_every",
    Event.CHECKPOINT_START: "train.save_every",
    Event.CHECKPOINT: "train.save_every",
    Event.MEMORY_DUMP: "NSA_MEM_DUMP_EVERY",
}
_STEPS_EACH = 2
# Proofs of toggles, compiling and one profile: so many steps in each block of an arm.
_PROOFS_A_BLOCK = 10
_KNOWN = frozenset(Event)


def beside_account(
    frame: pd.DataFrame, ranks: Sequence[RankLog], env: Mapping[str, Any]
) -> list[str]:
    """Ranks that did beside their steps what env.json does not ask for, or did it too often."""
    every, blocks, last = _every(env), _blocks(frame), (env.get("effective") or {}).get("steps")
    return [
        f"rank {rank.rank} did beside {found}"
        for rank in ranks
        for found in (*_unasked(rank, every, blocks, len(frame)), *_undrawn(rank, last))
    ]


def _undrawn(rank: RankLog, last: int | None) -> Iterator[str]:
    """Steps that were computed a second time, and no token draws them."""
    drawn = {
        step
        for token in rank.tokens
        for step in recomputed_steps(token, rank.first_step or 1, last or 1)
    }
    odd = [s for s, kinds in rank.beside.items() if Event.RECOMPUTED in kinds and s not in drawn]
    if odd:
        yield f"{len(odd)} steps {Event.RECOMPUTED}, first {odd[0]}, which no token draws"


def _unasked(rank: RankLog, every: Mapping[str, int], blocks: int, steps: int) -> Iterator[str]:
    seen = Counter(kind for kinds in rank.beside.values() for kind in kinds)
    for kind in sorted(seen.keys() & _ASKED.keys()):
        name = _ASKED[Event(kind)]
        cadence = every.get(name, 0)
        allowed = _STEPS_EACH * (steps // cadence + 1) if cadence else 0
        if seen[kind] > allowed:
            yield f"{seen[kind]} steps {kind}, of which no clock counts the time ({name}={cadence})"
    for kind in sorted(seen.keys() - _KNOWN):
        yield f"{seen[kind]} steps {kind[:40]!r}, which nothing asks for and no clock counts"
    others = _KNOWN - _ASKED.keys() - {Event.RECOMPUTED}
    proven = sum(not others.isdisjoint(kinds) for kinds in rank.beside.values())
    if proven > _PROOFS_A_BLOCK * blocks:
        kinds = ", ".join(sorted(seen.keys() & others))
        yield f"{proven} steps {kinds}, in {blocks} block(s): no clock counts the time"


def beside_words(frame: pd.DataFrame, rank: RankLog) -> str:
    """The share of the time that evaluations, checkpoints and dumps took, as far as one did."""
    asked = {step: kinds & _ASKED.keys() for step, kinds in rank.beside.items()}
    kinds = sorted(set().union(*asked.values()))
    if not kinds or rank.steps is None or "dt_s" not in frame:
        return ""
    both = with_clock(frame[["step", "dt_s"]], rank.steps)
    both = both[both["clock_s"].notna()]
    busy = both[both["step"].isin([step for step, own in asked.items() if own])]
    total = float(both["clock_s"].sum())
    if not total > 0:
        return ""
    share = max(0.0, float((busy["clock_s"] - busy["dt_s"]).sum())) / total
    return f"; {share:.1%} of the time went to {', '.join(kinds)} beside {len(busy)} step(s)"


def _every(env: Mapping[str, Any]) -> dict[str, int]:
    """How often, in steps, each kind is asked for; 0 for never."""
    train = (env.get("config") or {}).get("train") or {}
    toggles = recorded_toggles(env)
    told = {f"train.{name}": train.get(name) for name in ("eval_every", "save_every")}
    told["NSA_MEM_DUMP_EVERY"] = toggles.get("NSA_MEM_DUMP_EVERY")
    return {
        name: int(value) if isinstance(value, int | float) and value > 0 else 0
        for name, value in told.items()
    }


def _blocks(frame: pd.DataFrame) -> int:
    places = [name for name in ("arm", "block") if name in frame]
    return int(frame.groupby(places, dropna=False).ngroups) if places else 1
