"""Baseline DDP throughput: the number that decides go or no-go."""

from __future__ import annotations

from collections.abc import Sequence

from nsa.contract import COMPRESSION_LINE, proof_text
from phases.compare.accepted import against_best, against_last
from phases.compare.rates import (
    aim,
    last50s,
    launches,
    mfu,
    mfu_of_ceiling,
    production_days,
    rate_table,
    stale_target,
    throughput,
)
from phases.kit.case import Case, Finding, invalid, passed, skipped
from phases.kit.commands import repeated
from phases.kit.curves import losses, marks, throughputs
from phases.kit.limits import THROUGHPUT, fixed_rules, specs
from phases.kit.measure import rank_value
from phases.kit.rows import Row, RowPhase
from phases.machine.gpu_samples import balance, headroom, utilisation
from phases.training.plausible import alike
from phases.training.proofs import effect_problem
from phases.training.training import toggles_row, training_rows
from runbook.config.phase import Judgement, PlanContext
from runbook.records import Launch, Reason

_COMPRESS = "NSA_DDP_COMPRESS"


class Baseline(RowPhase):
    """Requirements B1 to B13."""

    name = "baseline"
    order = 20
    title = "Baseline DDP throughput"
    source = "requirements B1 to B13"
    question = "Does the production config reach the throughput that the plan needs?"
    fixed = fixed_rules("baseline")
    reads = ("preflight",)
    remembers = True
    limits = specs(
        "throughput", "throughput_aim_low", "throughput_aim_high", "accepted_loss",
        "mfu_floor", "mfu_of_ceiling", "gpu_utilisation", "gpu_imbalance",
        "memory_headroom", "flaky_launches",
    )  # fmt: skip

    def plan(self, context: PlanContext) -> list[Launch]:
        """The profile's launches of its steps, or one long one (`--protocol single`)."""
        return repeated(context, phase=self.name, purpose="throughput of the production config")

    def rows(self) -> Sequence[Row]:
        """The runbook's baseline judgements."""
        each, together = self.row.each, self.row.together
        return (
            *training_rows(self.names),
            together("comparable", alike),
            toggles_row(self.names, but=(_COMPRESS,)),
            each("compression", _compression),
            together("throughput", throughput, own=True),
            together("against_last_accepted", against_last),
            together("against_best_accepted", against_best),
            together("throughput_aim", aim, own=True),
            together("target_fresh", stale_target, own=True),
            together("mfu", mfu),
            together("mfu_of_ceiling", mfu_of_ceiling),
            together("gpu_utilisation", utilisation),
            together("gpu_balance", balance),
            each("memory_headroom", headroom),
            together("production_time", production_days, own=True),
        )

    def details(self, case: Case) -> Judgement:
        """The throughput of every launch, by the last-50 statistic (W3) and by tokens over time."""
        names = self.names(case)
        table = rate_table(case, launches(names), title="Throughput of each launch")
        limit = case.limit(THROUGHPUT)
        floor = marks(limit, "floor") if case.gates_throughput(limit) else ()
        return Judgement(
            checks=(),
            tables=(table,),
            measurements=last50s(case, names),
            series=(*throughputs(case, names, floor), *losses(case, names[0])),
        )


def _compression(case: Case, name: str) -> Finding:
    """PASS if it is proven and logged as `[ddp] gradient compression enabled: TYPE`."""
    launch = case.completed(name)
    wanted = launch.launch.env.get(_COMPRESS, "off")
    if wanted == "off":
        return skipped(Reason.NOT_ASKED_FOR, f"{name} was planned with {_COMPRESS}=off")
    line = f"{COMPRESSION_LINE}{wanted}"
    problems = [effect_problem(launch, _COMPRESS, wanted)]
    if not any(line in text for text in launch.console_lines):
        problems.append(f"the log has no line {line!r}")
    found = [problem for problem in problems if problem]
    paths = (launch.path("console"), *(rank.path for rank in launch.ranks[:1]))
    if found:
        return invalid(Reason.NO_EFFECT, f"{name}: {'; '.join(found)}", evidence=paths)
    proof = next(effect for effect in launch.effects(_COMPRESS) if effect.took_effect)
    value = rank_value(launch.ranks[0], "gradient_compression", wanted)
    return passed(
        f"{line!r} logged; {proof_text(proof.evidence)}", measurement=value, evidence=paths
    )
