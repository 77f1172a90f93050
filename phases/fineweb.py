"""FineWeb-Edu: the loader responds, and training on real text progresses."""

from __future__ import annotations

from collections.abc import Sequence

from phases.kit import specs
from phases.kit.case import Case
from phases.kit.commands import trainer_launch
from phases.kit.finding import Finding, ending, failed, invalid, missing, passed, skipped
from phases.kit.measure import against, log_value
from phases.kit.rows import Row, RowPhase, contract_only
from phases.training import training_rows
from phases.training.as_planned import data_problems
from runbook.config.registry import PlanContext
from runbook.records import Launch, Reason

_SMOKE, _TRAIN = "loader", "train"
_MISSING = ("datasets", "tiktoken")


class FineWeb(RowPhase):
    """Requirements D1 to D3."""

    name = "fineweb"
    order = 100
    title = "FineWeb-Edu"
    source = "requirements D1 to D3"
    question = "Does training on streamed text work?"
    optional = True
    limits = specs("loader_fetch_s", "flaky_launches")

    @contract_only
    def plan(self, context: PlanContext) -> list[Launch]:
        """A few steps in one process to test the loader (D1), then the training launch (D2)."""
        smoke = trainer_launch(
            context,
            phase=self.name,
            name=_SMOKE,
            steps=3,
            ddp=False,
            dataset="fineweb_edu",
            extra=("--seq-len", "1024", "--batch-size", "1", "--loader-timeout", "60"),
            purpose="is the loader responsive?",
        )
        train = trainer_launch(
            context,
            phase=self.name,
            name=_TRAIN,
            dataset="fineweb_edu",
            extra=("--loader-timeout", "120"),
            purpose="training on streamed text",
        )
        return [smoke, train]

    def rows(self) -> Sequence[Row]:
        """Loader and progress, or why there is neither here."""
        shared = [row for row in training_rows(lambda _: [_TRAIN]) if row.what != "plausible"]
        return (self.row.one("loader", _loader), *shared, self.row.one("progress", _progress))

    def instead(self, case: Case, row: Row) -> Finding | None:  # noqa: ARG002
        """Without the optional packages there is nothing to judge: SKIPPED, with their names."""
        absent = _missing_package(case)
        return skipped(Reason.NOT_ASKED_FOR, absent) if absent else None


def _missing_package(case: Case) -> str:
    for launch in case.evidence.launches.values():
        cause = launch.result.cause
        found = [name for name in _MISSING if name in cause]
        if found and launch.result.could_not_start:
            return f"the optional package {found[0]} is not installed: {cause}"
    return ""


def _loader(case: Case) -> Finding:
    end = ending(case.launch(_SMOKE))
    if end.code is not Reason.OK:
        return end
    launch = case.launch(_SMOKE)
    if problems := data_problems(launch, case.env(_SMOKE)):
        return invalid(Reason.MISMATCH, "; ".join(problems), evidence=(launch.path("env"),))
    log = case.log(_SMOKE)
    if "fetch_s" not in log.frame:
        raise missing(f"{log.path} has no column fetch_s", log.path)
    slowest = float(log.frame["fetch_s"].max())
    value = log_value(log, "fetch_s_max", slowest, "s")
    return against(value, case.limit("loader_fetch_s"), f"slowest batch after {slowest:.2f} s")


def _progress(case: Case) -> Finding:
    log = case.log(_TRAIN)
    losses = log.frame["loss"].to_numpy(dtype=float)
    part = max(len(losses) // 5, 1)
    first, last = float(losses[:part].mean()), float(losses[-part:].mean())
    value = log_value(log, "loss_change", last - first, "nats")
    text = f"mean loss {first:.3f} in the first fifth, {last:.3f} in the last"
    if last < first:
        return passed(text, measurement=value)
    return failed(Reason.MISMATCH, f"no progress: {text}", measurement=value)
