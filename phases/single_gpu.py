"""Single-GPU isolation: what the second GPU adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phases.compare import scaling
from phases.compare.node_scaling import NODE_SCALING, node_scaling_rows, node_scaling_table
from phases.compare.rates import last50s, launch_rates, launches, pooled_rate, rate_table
from phases.kit.case import Case, gather
from phases.kit.commands import repeated
from phases.kit.curves import throughputs
from phases.kit.finding import Finding, failed, lost_heartbeats, missing, passed, skipped
from phases.kit.limits import FIRST_LOSS_TOLERANCE, fixed_rules, specs
from phases.kit.measure import decided, shown_only
from phases.kit.rows import Row, RowPhase, answered
from phases.machine.ceilings import require_ranks
from phases.training.plausible import alike
from phases.training.training import require_sound, toggles_row, training_rows
from runbook.accounts.data import union_of_data
from runbook.config.phase import Judgement, PlanContext
from runbook.records import Launch, Measurement, Reason
from runbook.stats.decision import Decision
from runbook.stats.launches import scaling as decide
from runbook.stats.plans import SCALING_PLAN

# What may differ between N ranks and one at one global batch: also how it is spread.
_SPREAD = (*scaling.RANKS, "effective.per_rank_batch")


class SingleGpu(RowPhase):
    """Requirements S1 to S5.

    E = T_N / (N * T_1) is gated at the same batch for each GPU (weak scaling): each GPU does the
    same work on both sides, so what E lacks is the cost of working together. The production config
    fixes the *global* batch: one GPU that runs all of it has N times the work per launch of a
    kernel, so that E (strong scaling) also falls where the host is slow. It is shown beside.
    """

    name = "single_gpu"
    order = 70
    title = "Single-GPU isolation"
    source = "requirements S1 to S5"
    question = "How close to linear is the scaling?"
    fixed = fixed_rules("single_gpu")
    reads = ("preflight", "baseline")
    needs = ("baseline",)
    limits = specs("scaling", "flaky_launches")

    def plan(self, context: PlanContext) -> list[Launch]:
        """As many launches without DDP as the baseline has with it: they form pairs.

        In turn with them, in balanced rounds, the subsets of ranks at one batch per rank.
        """
        arms = [
            self._whole(context),
            *(scaling.subset_launches(one, context, self.name) for one in scaling.subsets(context)),
        ]
        rounds = list(zip(*arms, strict=True))
        turns = [one[::-1] if number % 2 else one for number, one in enumerate(rounds)]
        return [launch for turn in turns for launch in turn]

    def _whole(self, context: PlanContext) -> list[Launch]:
        purpose = "the same global batch on one device"
        return repeated(context, phase=self.name, purpose=purpose, ddp=False)

    def names(self, case: Case) -> Sequence[str]:
        """The launches with the whole global batch."""
        return [launch.name for launch in self._whole(case.context)]

    def _one_device(self, case: Case) -> scaling.Side:
        """At one batch per rank; at one global batch where nothing else is planned."""
        return self._same_batch(case) or self._same_global(case)

    def _batch(self, case: Case) -> str:
        return "batch per rank" if self._same_batch(case) else "global batch"

    def _same_batch(self, case: Case) -> scaling.Side | None:
        return (
            scaling.side_of(case, scaling.ONE_RANK)
            if scaling.ONE_RANK in scaling.subsets(case.context)
            else None
        )

    def _same_global(self, case: Case) -> scaling.Side:
        return scaling.Side(case=case, names=self.names(case), ranks=1)

    def _with_subsets(self, row: Row) -> Row:
        """The row over all kinds of launches; the worst answer counts."""

        def of(side: scaling.Side) -> Row:
            return next(one for one in training_rows(lambda _: side.names) if one.what == row.what)

        def answer(case: Case) -> Finding:
            sides = [scaling.side_of(case, subset) for subset in scaling.subsets(case.context)]
            found = [answered(row, case), *(answered(of(side), side.case) for side in sides)]
            return min(found, key=lambda one: one.outcome.rank)

        return replace(row, answer=answer)

    def rows(self) -> Sequence[Row]:
        """Alone it ran well; with the baseline it is comparable; the efficiency follows."""
        return (
            *(self._with_subsets(row) for row in training_rows(self.names)),
            self.row.together("comparable", alike),
            toggles_row(self.names),
            self.row.one("same_as_baseline", self._same_as_baseline),
            self.row.one("scaling", self._scaling),
            self.row.one("link", self._link),
            self.row.one("scaling_global_batch", self._strong),
        )

    def asked(self, context: PlanContext) -> Sequence[Row]:
        """Over several nodes also what each further one adds."""
        return (*self.rows(), *node_scaling_rows(context))

    def needed_on_nodes(self, context: PlanContext) -> tuple[str, ...]:
        """What decides for all nodes together decides for fewer of them too."""
        decides = f"{self.name}.scaling" in context.profile.required
        return tuple(f"{self.name}.{row.what}" for row in node_scaling_rows(context) if decides)

    def _same_as_baseline(self, case: Case) -> Finding:
        require_ranks(case)
        unlike = scaling.unlike_baseline(case, self.names(case), but=_SPREAD)
        return (
            unlike
            or self._same_data(case.earlier("baseline"), case)
            or passed(
                "config, checkout, versions, device, data and first loss are those of the baseline"
            )
        )

    def _same_data(self, before: Case, case: Case) -> Finding | None:
        """All ranks together read what one rank reads, and begin with the loss that it has."""
        first, name = next(iter(before.evidence.launches)), self.names(case)[0]
        many, one = before.completed(first), case.completed(name)
        paths = [rank.path for rank in (*many.ranks, *one.ranks)]
        for side in (many, one):
            if len(side.ranks) != side.launch.nproc:
                told = f"heartbeats of {len(side.ranks)} of {side.launch.nproc} ranks are there"
                lost = ", ".join(lost_heartbeats(side)) or side.launch.run_dir
                raise missing(f"{side.launch.id}: {told}; not there: {lost}", *paths)
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
        """The efficiency, and on how many nodes it was measured where there are several."""
        found, nodes = self._weak(case), case.context.nodes
        if nodes < 2 or found.measurement is None:
            return found
        rest = f"; fewer nodes: {NODE_SCALING}" if scaling.numbers_of_nodes(case.context) else ""
        measured = f"one rank on 1 node and {case.profile.ranks} ranks on {nodes}{rest}"
        return replace(found, reason=f"{found.reason}; measured: {measured}")

    def _weak(self, case: Case) -> Finding:
        """At one batch per GPU; at one global batch where nothing else was launched.

        That of a trainer of one's own decides if the profile says that it is one batch per rank.
        """
        limit = case.limit("scaling")
        require_ranks(case)
        one, own = self._one_device(case), case.profile.own_trainer
        value, decision = self._efficiency(case, one)
        same = "" if own else f" at the same {self._batch(case)}"
        if not limit.gated or (own and own.tokens_per_rank is None):
            return shown_only(value, limit, f"efficiency{same}: {value}")
        if not own and (unlike := scaling.unlike_baseline(case, one.names)):
            return replace(unlike, measurement=value)
        return decided(decision, value, limit)

    def _link(self, case: Case) -> Finding:
        """E against that of a step without overlap over the link that preflight measured."""
        limit = case.limit("scaling")
        require_ranks(case)
        one = self._one_device(case)
        value, decision = self._efficiency(case, one)
        if not limit.gated and "preflight" not in case.evidence.earlier:
            reason = f"{value}; preflight, which measures the link, was not run"
            return skipped(Reason.NOT_GATED, reason, measurement=value)
        expected = scaling.without_overlap(case, pooled_rate(one.case, one.names))
        if not limit.gated:
            text = f"efficiency at the same {self._batch(case)}: {value}; {expected.note}"
            return shown_only(expected, limit, text)
        return scaling.explained(value, expected, limit, decision)

    def _strong(self, case: Case) -> Finding:
        require_ranks(case)
        value, _ = self._efficiency(case, self._same_global(case))
        text = f"{value}: never decides, one GPU has {case.profile.ranks} times the batch"
        return skipped(Reason.NOT_GATED, text, measurement=value)

    def _efficiency(self, case: Case, one: scaling.Side) -> tuple[Measurement, Decision]:
        """E of the baseline's launches against these of one device, and what it decides."""
        ranks, whole = case.profile.ranks, scaling.whole_side(case)
        require_sound(one.case, one.names)
        alone = launch_rates(one.case, one.names)
        together = launch_rates(whole.case, whole.names)
        pairs = min(len(alone), len(together))
        decision = decide(
            [float(rate.value) for rate in alone[:pairs]],
            [float(rate.value) for rate in together[:pairs]],
            ranks,
            limit=case.limit("scaling").value,
            plan=SCALING_PLAN,
        )
        note = f"T_{ranks} from the baseline phase, T_1 from {', '.join(one.names[:pairs])}"
        counted = (alone[:pairs], together[:pairs])
        return scaling.efficiency("scaling_efficiency", *counted, decision, note=note), decision

    def details(self, case: Case) -> Judgement:
        """Every launch on one device, and each number of nodes."""
        names, same = self.names(case), self._same_batch(case)
        shares = same.names if same else ()
        tables = (
            node_scaling_table(case),
            rate_table(case, launches([*names, *shares]), title="Throughput on one device"),
        )
        return Judgement(
            tables=gather(tables),
            measurements=last50s(case, [*names, *shares]),
            series=throughputs(case, [*names, *shares]),
        )
