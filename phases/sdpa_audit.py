"""SDPA backend audit: the kernel that really ran in each branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nsa.toggles import meaning
from phases.compare import ArmFault, arm_fault, dropped, refused
from phases.kit import specs
from phases.kit.case import Case, optional
from phases.kit.commands import INTERLEAVED, environment, interleaved
from phases.kit.finding import Finding, failed, invalid, missing, passed, skipped, warned
from phases.kit.measure import file_value
from phases.kit.rows import Row, RowPhase, contract_only
from phases.training import toggles_row, training_rows
from phases.training.as_planned import effect_problem
from runbook.config.precedence import SAFE_MODE
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Launch, Reason, Table

_DEFAULT, _FLASH, _NO_FLASH = "default", "flash_only", "no_flash"
_BRANCHES = ("cmp", "sel", "win")
# The first arm is what will train. The A/B of the two SDPA settings is about the SDPA path, so the
# Triton kernels are off in both.
_ARMS: dict[str, dict[str, str]] = {
    _DEFAULT: {"NSA_SDPA_AUDIT": "1"},
    _FLASH: {"NSA_SDPA_AUDIT": "1", "NSA_SDPA_FLASH_ONLY": "1", "NSA_USE_TRITON_SEL": "0"},
    _NO_FLASH: {"NSA_SDPA_AUDIT": "1", "NSA_SDPA_NO_FLASH": "1", "NSA_USE_TRITON_SEL": "0"},
}
_MAIN = {_FLASH: "NSA_SDPA_FLASH_ONLY", _NO_FLASH: "NSA_SDPA_NO_FLASH"}
_OTHER = {_FLASH: _MAIN[_NO_FLASH], _NO_FLASH: _MAIN[_FLASH]}

# The rows that say themselves what became of an arm.
_OWN = ("audited", "kernels", _FLASH, _NO_FLASH, "stable")


class SdpaAudit(RowPhase):
    """Requirements A1 to A7."""

    name = "sdpa_audit"
    order = 40
    title = "SDPA backend audit"
    source = "requirements A1 to A7"
    question = "Which attention kernel really runs in each branch?"
    limits = specs("flaky_launches")

    def compares(self, context: PlanContext) -> Mapping[str, str]:  # noqa: ARG002
        """What its arms decide; of the two settings of SDPA, the first arm has what was given."""
        return _ARMS[_DEFAULT]

    @contract_only
    def plan(self, context: PlanContext) -> list[Launch]:
        """The default or what was given, flash only and no flash, in one launch in this order."""
        arms = _arms(context)
        return [
            interleaved(
                context,
                phase=self.name,
                arms=arms,
                extra=_ARMS[_DEFAULT],
                shuffled=False,
                purpose=f"audit the kernels: {', '.join(arms).replace('_', ' ')}",
            )
        ]

    def rows(self) -> Sequence[Row]:
        """Audit present, kernels as expected, and which of the two settings is usable."""
        return (
            *training_rows(self.names),
            toggles_row(self.names, but=("NSA_SDPA_AUDIT",)),
            self.row.one("audited", _audited),
            self.row.one("kernels", _kernels),
            self.row.one("flash_only", partial(_arm, arm=_FLASH)),
            self.row.one("no_flash", partial(_arm, arm=_NO_FLASH)),
            self.row.one("stable", _stable),
        )

    def instead(self, case: Case, row: Row) -> Finding | None:
        """A fault of an optional arm only drops that arm, which the audit's own rows say."""
        return None if row.what in _OWN else dropped(case, row, _fault(case))

    def details(self, case: Case) -> Judgement:
        """Kernel per branch and arm."""
        audit = optional(lambda: _audit(case))
        arms = _arms(case.context)
        rows = [(arm, *(_cell(audit, arm, branch) for branch in _BRANCHES)) for arm in arms]
        table = Table(
            title="Kernel per branch",
            columns=("arm", "compressed", "selected", "window"),
            rows=tuple(rows),
            note="from the profiler's operators inside each branch's range",
        )
        return Judgement(tables=(table,))


def _arms(context: PlanContext) -> dict[str, dict[str, str]]:
    """Each arm's toggles; the safe mode forbids one, and one of the two may be given for all."""
    given = environment(context, SdpaAudit.name)
    arms = {arm: dict(settings) for arm, settings in _ARMS.items()}
    for arm, other in _OTHER.items():
        if meaning(other, given):
            arms[arm][other] = "0"
    if meaning(SAFE_MODE, given):
        del arms[_FLASH]
    return arms


def _fault(case: Case) -> ArmFault | None:
    return arm_fault(case, optional_arms=[_FLASH, _NO_FLASH])


def _audit(case: Case) -> Mapping[str, Any]:
    """The audit's arms; the audit is written as the run goes, so a later fault spoils nothing."""
    launch = case.launch(INTERLEAVED)
    arms = (launch.audit or {}).get("arms")
    if arms:
        return dict(arms)
    case.completed(INTERLEAVED)
    reason = "the audit wrote nothing, so no kernel is known"
    raise invalid(Reason.NO_EFFECT, reason, evidence=(launch.path("console"),))


def _cell(audit: Mapping[str, Any] | None, arm: str, branch: str) -> str:
    found = (((audit or {}).get(arm) or {}).get("branches") or {}).get(branch) or {}
    return str(found.get("kernel") or "not seen")


def _kernel_map(case: Case, arm: str) -> dict[str, str]:
    """Kernel by branch of an arm; raises where a branch was not seen."""
    audit, launch = _audit(case), case.launch(INTERLEAVED)
    found = {branch: _cell(audit, arm, branch) for branch in _BRANCHES}
    unseen = [branch for branch, kernel in found.items() if kernel == "not seen"]
    if unseen:
        reason = f"arm {arm}: no kernel seen in {', '.join(unseen)}"
        raise invalid(Reason.NO_EFFECT, reason, evidence=(launch.path("audit"),))
    return found


def _kernels_of(*joined: str) -> set[str]:
    """The kernels of a branch, whose chunks may each have another one, in any order."""
    return {kernel for names in joined for kernel in names.split("+")}


def _said(kernels: Mapping[str, str]) -> str:
    return ", ".join(f"{branch}: {kernel}" for branch, kernel in kernels.items())


def _audited(case: Case) -> Finding:
    kernels = _kernel_map(case, _DEFAULT)
    launch = case.launch(INTERLEAVED)
    problem = effect_problem(launch, "NSA_SDPA_AUDIT", "1")
    if problem:
        return invalid(Reason.NO_EFFECT, problem, evidence=(launch.path("audit"),))
    text = _said(kernels)
    return passed(text, measurement=file_value(launch, "audit", "kernels", text))


def _kernels(case: Case) -> Finding:
    kernels, launch = _kernel_map(case, _DEFAULT), case.launch(INTERLEAVED)
    expected = case.profile.kernels
    value = file_value(launch, "audit", "kernels", _said(kernels))
    wrong = [
        f"{branch}: {kernel}, expected only {' or '.join(expected[branch])}"
        for branch, kernel in kernels.items()
        if branch in expected and not _kernels_of(kernel) <= _kernels_of(*expected[branch])
    ]
    given = environment(case.context, SdpaAudit.name)
    forbids = next((name for name in (SAFE_MODE, _MAIN[_NO_FLASH]) if meaning(name, given)), "")
    if wrong and forbids:
        reason = f"{forbids}=1 forbids flash, which the profile expects: {'; '.join(wrong)}"
        return invalid(Reason.NOT_COMPARABLE, reason, measurement=value)
    if wrong:
        reason = f"unexpected fallback: {'; '.join(wrong)}"
        return failed(Reason.MISMATCH, reason, measurement=value)
    source = case.profile.kernels_source or "no expectation in the profile"
    return passed(f"{_said(kernels)} ({source})", measurement=value)


def _arm(case: Case, arm: str) -> Finding:
    """Usable, or not usable with the reason: an answer either way; no proof is INVALID."""
    if arm not in _arms(case.context):
        return skipped(Reason.NOT_COMPARABLE, f"{SAFE_MODE}=1 forbids {_MAIN[arm]}=1")
    launch, fault = case.launch(INTERLEAVED), _fault(case)
    if fault is None or fault[0] != arm:
        fault = refused(launch, [arm])
    if fault is not None:
        _, end = fault
        return warned(f"not usable: {end.reason}", evidence=end.evidence, topic=end.topic)
    table = None if launch.training is None else launch.training.frame
    rows = 0 if table is None or "arm" not in table else int((table["arm"] == arm).sum())
    if rows == 0:
        case.completed(INTERLEAVED)
        raise missing(f"arm {arm} wrote no step")
    problem = effect_problem(launch, _MAIN[arm], "1", arm=arm)
    if problem:
        return invalid(Reason.NO_EFFECT, problem, evidence=(launch.path("audit"),))
    kernels = _kernel_map(case, arm)
    text = f"usable, {rows} steps; {_said(kernels)}"
    return passed(text, measurement=file_value(launch, "audit", f"kernels_{arm}", _said(kernels)))


def _stable(case: Case) -> Finding:
    answers = {arm: _arm(case, arm) for arm in _MAIN}
    usable = [arm for arm, found in answers.items() if found.code is Reason.OK]
    paths = tuple(dict.fromkeys(path for found in answers.values() for path in found.evidence))
    if usable:
        first = answers[usable[0]]
        return passed(f"usable: {', '.join(usable)}", measurement=first.measurement, evidence=paths)
    if all(found.code is Reason.WARNING for found in answers.values()):
        reasons = "; ".join(f"{arm}: {found.reason}" for arm, found in answers.items())
        return failed(Reason.CRASH, f"unstable with and without flash: {reasons}", evidence=paths)
    return next(found for found in answers.values() if found.code is not Reason.WARNING)
