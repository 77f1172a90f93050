"""Single-GPU isolation: what the second GPU adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nsa.settings import CONFIG_TOGGLES
from nsa.toggles import TOGGLES
from phases.compare import unlike_baseline
from phases.compare.rates import launch_rates, shown
from phases.kit import FIRST_LOSS_TOLERANCE, fixed_rules, specs
from phases.kit.case import Case, once
from phases.kit.commands import repeated
from phases.kit.finding import Finding, failed, lost_heartbeats, missing, passed, skipped
from phases.kit.measure import decided, derived, shown_only
from phases.kit.rows import Row, RowPhase, answered
from phases.training import require_sound, toggles_row, training_rows
from phases.training.plausible import alike
from runbook.accounts.data import union_of_data
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Measurement, Reason
from runbook.stats import SCALING_PLAN, Decision
from runbook.stats.launches import scaling

# What may differ between N ranks and one at one global batch: also how it is spread.
_RANKS = (
    "world_size",
    "effective.world_size",
    "versions.nccl",
    *(f"toggles.{name}" for name in TOGGLES if name.startswith("NSA_DDP_")),
)
_SPREAD = (*_RANKS, "effective.per_rank_batch")
_BATCH = "train.batch_size"
# The toggle by which a profile of more than two cards says the same.
_BATCH_TOGGLE = next(name for name, key in CONFIG_TOGGLES.items() if key == _BATCH)
# At one batch per rank also the global one, and what follows from it.
_GROWN = (
    *_RANKS,
    "effective.global_batch",
    "effective.tokens_per_step",
    f"config.{_BATCH}",
    f"toggles.{_BATCH_TOGGLE}",
    "config_sha256",
)


def _of_batch(launch: Launch, batch: int) -> dict[str, object]:
    """What differs of a launch with this global batch, which it is given in one way only."""
    env = {name: text for name, text in launch.env.items() if name != _BATCH_TOGGLE}
    return {"env": env, "config_overrides": {**launch.config_overrides, _BATCH: batch}}


@once
def _share_case(case: Case, _name: str) -> Case:
    """The case in which one rank's share of the batch is the whole one."""
    work = case.profile.workload
    share = work.model_copy(update={"global_batch": work.global_batch // case.profile.ranks})
    profile = case.profile.model_copy(update={"workload": share})
    context = replace(case.context, profile=profile)
    return Case(phase=case.phase, evidence=case.evidence, context=context)


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

        In turn with them, in balanced rounds, those with one rank's share of the batch.
        """
        arms = [arm for arm in (self._whole(context), self._shares(context)) if arm]
        rounds = list(zip(*arms, strict=True))
        turns = [one[::-1] if number % 2 else one for number, one in enumerate(rounds)]
        return [launch for turn in turns for launch in turn]

    def _whole(self, context: PlanContext) -> list[Launch]:
        own = context.profile.own_trainer
        grows = own is not None and own.tokens_per_rank is not None
        batch = "one rank's batch" if grows else "the same global batch"
        purpose = f"{batch} on one device"
        return repeated(context, phase=self.name, purpose=purpose, ddp=False)

    def _shares(self, context: PlanContext) -> list[Launch]:
        """None where throughput does not decide."""
        profile = context.profile
        if profile.ranks < 2 or profile.own_trainer or not profile.throughput_gated:
            return []
        purpose = "one rank's share of the batch on one device"
        planned = repeated(context, phase=self.name, purpose=purpose, ddp=False, named="share")
        whole = context.config_overrides.get(_BATCH, profile.workload.global_batch)
        batch = int(whole) // profile.ranks
        return [one.model_copy(update=_of_batch(one, batch)) for one in planned]

    def names(self, case: Case) -> Sequence[str]:
        """The launches with the whole global batch."""
        return [launch.name for launch in self._whole(case.context)]

    def _share_names(self, case: Case) -> list[str]:
        """The launches with one rank's share of it."""
        return [launch.name for launch in self._shares(case.context)]

    def _with_shares(self, row: Row) -> Row:
        """The row over both kinds of launches; the worse answer counts."""

        def answer(case: Case) -> Finding:
            found, shares = [answered(row, case)], self._share_names(case)
            if shares:
                theirs = training_rows(lambda _: shares)
                of_shares = next(one for one in theirs if one.what == row.what)
                found.append(answered(of_shares, _share_case(case, "")))
            return min(found, key=lambda one: one.outcome.rank)

        return replace(row, answer=answer)

    def rows(self) -> Sequence[Row]:
        """Alone it ran well; with the baseline it is comparable; the efficiency follows."""
        return (
            *(self._with_shares(row) for row in training_rows(self.names)),
            self.row.together("comparable", alike),
            toggles_row(self.names),
            self.row.one("same_as_baseline", self._same_as_baseline),
            self.row.one("scaling", self._scaling),
            self.row.one("scaling_global_batch", self._strong),
        )

    def _same_as_baseline(self, case: Case) -> Finding:
        case.require_ranks()
        unlike = unlike_baseline(case, self.names(case)[0], but=_SPREAD)
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
        measured = f"one rank on 1 node and {case.profile.ranks} ranks on {nodes}"
        return replace(found, reason=f"{found.reason}; measured: {measured}")

    def _weak(self, case: Case) -> Finding:
        """At one batch per GPU; at one global batch where nothing else was launched.

        That of a trainer of one's own decides if the profile says that it is one batch per rank.
        """
        limit = case.limit("scaling")
        case.require_ranks()
        shares, own = self._share_names(case), case.profile.own_trainer
        one, names = (_share_case(case, ""), shares) if shares else (case, self.names(case))
        value, decision = self._efficiency(case, one, names)
        same = "" if own else f" at the same {'batch per rank' if shares else 'global batch'}"
        if not limit.gated or (own and own.tokens_per_rank is None):
            return shown_only(value, limit, f"efficiency{same}: {value}")
        if not own and (unlike := unlike_baseline(case, names[0], but=_GROWN)):
            return replace(unlike, measurement=value)
        return decided(decision, value, limit)

    def _strong(self, case: Case) -> Finding:
        case.require_ranks()
        value, _ = self._efficiency(case, case, self.names(case))
        text = f"{value}: never decides, one GPU has {case.profile.ranks} times the batch"
        return skipped(Reason.NOT_GATED, text, measurement=value)

    def _efficiency(
        self, case: Case, one: Case, names: Sequence[str]
    ) -> tuple[Measurement, Decision]:
        """E of the baseline's launches against these of one device, and what it decides.

        `one` is the case that those are read from.
        """
        ranks, whole = case.profile.ranks, case.earlier("baseline")
        require_sound(one, names)
        alone = launch_rates(one, names)
        together = launch_rates(whole, list(whole.evidence.launches))
        pairs = min(len(alone), len(together))
        alone, together = alone[:pairs], together[:pairs]
        decision = scaling(
            [float(rate.value) for rate in alone],
            [float(rate.value) for rate in together],
            ranks,
            limit=case.limit("scaling").value,
            plan=SCALING_PLAN,
        )
        note = f"T_{ranks} from the baseline phase, T_1 from {', '.join(names[:pairs])}"
        value = derived(
            together[0],
            name="scaling_efficiency",
            value=float(decision.estimate or 0.0),
            unit="",
            n=pairs,
            interval=decision.interval,
            note=note,
            also=[*together, *alone],
        )
        return value, decision

    def details(self, case: Case) -> Judgement:
        """Every launch on one device."""
        names = [*self.names(case), *self._share_names(case)]
        return shown(case, names, title="Throughput on one device")
