"""Rows, phases and launches of a record, of which a test says only what it is about."""

from __future__ import annotations

from runbook.records import Check, Launch, Outcome, PhaseRecord, Reason


def check(
    name: str, outcome: Outcome = Outcome.PASS, code: Reason | None = None, **told: object
) -> Check:
    """A row by its id; the code of a PASS is OK, that of all others MISMATCH unless told."""
    good = outcome in (Outcome.PASS, Outcome.SKIPPED)
    given: dict[str, object] = {
        "id": name, "phase": name.partition(".")[0], "question": "?", "outcome": outcome,
        "code": code or (Reason.OK if good else Reason.MISMATCH), "reason": "so",
        "remedy": "" if good else "do",
    }  # fmt: skip
    return Check.model_validate(given | told)


def phase(name: str, *checks: Check, **told: object) -> PhaseRecord:
    """A phase with these rows; its outcome is that of the first one unless told."""
    given: dict[str, object] = {"title": name.title(), "source": "a test", "checks": checks}
    if checks:
        given["outcome"] = checks[0].outcome
    return PhaseRecord.model_validate({"name": name, **given, **told})


def launch(*argv: str, **told: object) -> Launch:
    """A launch of a trainer on two ranks; its folder is that of its phase and name."""
    given: dict[str, object] = {
        "name": "run1", "phase": "baseline", "kind": "trainer", "argv": argv, "env": {}, "nproc": 2,
        "steps": 5, "timeout_s": 60,
    } | told  # fmt: skip
    return Launch.model_validate({"run_dir": f"{given['phase']}/{given['name']}", **given})
