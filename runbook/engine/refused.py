"""What a run says whose files its disk refused, and what to do before it goes on."""

from __future__ import annotations

import errno

from runbook.records import THE_RUN, PhaseRecord, RunRecord, Verdict

_THEN = "then continue the run with --resume, or start it anew with another --out"
_FULL = f"free space on the disk of --out first (`df -h` shows it; a quota: `quota`), {_THEN}"
# By errno.
REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: f"raise the limit of a file's size first (`ulimit -f unlimited`), {_THEN}",
}
_NOT_WRITABLE = f"make the folder of the run writable again first, {_THEN}"


# How the reason begins, by which a screen knows it.
NOT_WRITTEN = "the run's files cannot be written"


def refused(record: RunRecord, error: OSError, what: str) -> RunRecord:
    """The record as far as it came, never GO; what it has not come to says what to do first.

    `what`: file and error, in words.
    """
    remedy = REMEDIES.get(error.errno or 0, _NOT_WRITABLE)
    fields = {
        "phases": tuple(_remedied(phase, remedy) for phase in record.phases),
        "verdict": Verdict.NO_GO if record.verdict is Verdict.NO_GO else Verdict.INCOMPLETE,
        "reasons": (f"{NOT_WRITTEN} ({what})", *record.reasons[:1]),
    }
    return record.model_copy(update=fields)


def _remedied(phase: PhaseRecord, remedy: str) -> PhaseRecord:
    checks = tuple(
        check.model_copy(update={"remedy": remedy}) if check.follows == THE_RUN else check
        for check in phase.checks
    )
    return phase.model_copy(update={"checks": checks})
