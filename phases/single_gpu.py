"""Single-GPU isolation: what the second GPU adds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nsa.toggles import TOGGLES
from phases.common.case import Case, Finding, failed, invalid, missing, passed, skipped
from phases.common.commands import repeated
from phases.common.measure import decided, derived, shown_only, with_limit
from phases.common.plausible import alike, differences
from phases.common.rates import (
    cell,
    gather,
    last50s,
    launch_rate,
    launch_rates,
    optional,
    rate_table,
)
from phases.common.rows import Row, RowPhase
from phases.common.training import require_sound, toggles_row, training_rows
from phases.limits import FIRST_LOSS_TOLERANCE, FLAKY_LAUNCHES, PAIRED, SCALING
from runbook.read.accounts import union_of_data
from runbook.records import Launch, Reason, Table
from runbook.records.phase import Judgement, PlanContext

# What may differ between N ranks and one: how the same global batch is spread, and DDP itself.
_SPREAD = (
    "world_size",
    "effective.per_rank_batch",
    "effective.world_size",
    "versions.nccl",
    *(f"toggles.{name}" for name in TOGGLES if name.startswith("NSA_DDP_")),
)


class SingleGpu(RowPhase):
    """Requirements S1 to S5.

    The production config fixes the *global* batch, so one GPU runs all of it: E = T_N / (N * T_1)
    is efficiency at the same global batch (strong scaling). One GPU gains from the larger batch
    per device, so this E is a lower estimate of that at equal batch per GPU.
    """

    name = "single_gpu"
    order = 70
    title = "Single-GPU isolation"
    source = "requirements S1 to S5"
    question = "How close to linear is the scaling?"
    fixed = PAIRED
    reads = ("baseline",)
    needs = ("baseline",)
    limits = (SCALING, FLAKY_LAUNCHES)

    def plan(self, context: PlanContext) -> list[Launch]:
        """As many launches without DDP as the baseline has with it: they form pairs."""
        purpose = "the same global batch on one device"
        return repeated(context, phase=self.name, purpose=purpose, ddp=False)

    def rows(self) -> Sequence[Row]:
        """Alone it ran well; with the baseline it is comparable; the efficiency follows."""
        return (
            *training_rows(self.names),
            Row("comparable", "Did all launches run the same configuration?", self.over(alike)),
            toggles_row(self.names),
            Row(
                "same_as_baseline",
                "Do the two sides differ only in the number of ranks?",
                self._same_as_baseline,
                topic="scaling",
            ),
            Row(
                "scaling",
                "Is scaling near-linear: E = T_N / (N x T_1) at one global batch?",
                self._scaling,
                topic="scaling",
            ),
        )

    def _same_as_baseline(self, case: Case) -> Finding:
        if case.profile.ranks < 2:
            return skipped(Reason.NEEDS_GPUS, f"profile {case.profile.name} has one rank")
        before, names = case.earlier("baseline"), self.names(case)
        for first in before.evidence.launches:
            unlike = differences(before.env(first), case.env(names[0]), but=_SPREAD)
            paths = (before.launch(first).env_path, case.launch(names[0]).env_path)
            if unlike:
                reason = f"baseline against one device: {'; '.join(unlike)}"
                return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
        return self._same_data(before, case) or passed(
            "config, checkout, versions, device, data and first loss are those of the baseline"
        )

    def _same_data(self, before: Case, case: Case) -> Finding | None:
        """All ranks together read what one rank reads, and begin with the loss that it has."""
        first, name = next(iter(before.evidence.launches)), self.names(case)[0]
        many, one = before.completed(first), case.completed(name)
        paths = [rank.path for rank in (*many.ranks, *one.ranks)]
        together, alone = union_of_data(many.ranks), union_of_data(one.ranks)
        if together is None or alone is None:
            raise missing("the ranks do not say which data they read", *paths)
        steps = together.index.intersection(alone.index)
        unlike = steps[(together[steps] != alone[steps]).to_numpy()]
        if len(unlike) or not len(steps):
            reason = f"the ranks together read other data than one rank in {len(unlike)} steps"
            return failed(Reason.UNBALANCED, reason, evidence=paths, topic="accounts")
        losses = [float(log.frame["loss"].iloc[0]) for log in (before.log(first), case.log(name))]
        if not abs(losses[0] / losses[1] - 1) <= FIRST_LOSS_TOLERANCE:
            reason = f"the first loss of all ranks is {losses[0]:.5f}, of one rank {losses[1]:.5f}"
            return failed(Reason.UNBALANCED, reason, evidence=paths, topic="accounts")
        return None

    def _scaling(self, case: Case) -> Finding:
        from runbook.stats import SCALING_PLAN, scaling

        ranks = case.profile.ranks
        if ranks < 2:
            return skipped(Reason.NEEDS_GPUS, f"profile {case.profile.name} has one rank")
        require_sound(case, self.names(case))
        alone = launch_rates(case, self.names(case))
        before = case.earlier("baseline")
        together = launch_rates(before, list(before.evidence.launches))
        pairs = min(len(alone), len(together))
        limit = case.limit(SCALING)
        decision = scaling(
            [float(rate.value) for rate in alone[:pairs]],
            [float(rate.value) for rate in together[:pairs]],
            ranks,
            limit=limit.value,
            plan=SCALING_PLAN,
        )
        value = derived(
            together[0],
            name="scaling_efficiency",
            value=float(decision.estimate or 0.0),
            unit="",
            n=pairs,
            interval=decision.interval,
            note=f"T_{ranks} from the baseline phase, T_1 from this one",
            also=[*together[:pairs], *alone[:pairs]],
        )
        if not case.gates_throughput(limit):
            return shown_only(value, limit, f"efficiency at the same global batch: {value}")
        same = self._same_as_baseline(case)
        if same.code is Reason.NOT_COMPARABLE:
            return invalid(
                Reason.NOT_COMPARABLE, same.reason, measurement=value, evidence=same.evidence
            )
        paths = [rate.path for rate in (*together[:pairs], *alone[:pairs])]
        return with_limit(decided(decision, value, evidence=paths), value, limit)

    def details(self, case: Case) -> Judgement:
        """Both sides, per launch and per device."""
        names = self.names(case)
        tables = (rate_table(case, names, title="Throughput on one device"), self._sides(case))
        return Judgement(checks=(), tables=gather(tables), measurements=last50s(case, names))

    def _sides(self, case: Case) -> Table | None:
        before = optional(lambda: case.earlier("baseline"))
        if before is None:
            return None
        rows = []
        for first, second in zip(before.evidence.launches, self.names(case), strict=False):
            many = optional(partial(launch_rate, before, first))
            one = optional(partial(launch_rate, case, second))
            if many and one:
                each = float(many.value) / case.profile.ranks
                rows.append(
                    (
                        f"{first} / {second}",
                        cell(many),
                        round(each, 1),
                        cell(one),
                        round(each / float(one.value), 3),
                    )
                )
        return Table(
            title="All ranks against one, pair by pair",
            columns=("pair", "all ranks", "per rank", "one device", "E"),
            rows=tuple(rows),
            note="tok/s, tokens / time after warm-up; the same global batch on both sides",
        )
