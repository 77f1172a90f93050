"""The numbers of a run's first page: throughput, scaling, memory and what else decided.

Each is the measurement of a check; one that this run lacks is a number without a value.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from reports.text import NOT_GATED_WORDS, limit_text, one_line, shown_value
from runbook.files import shipped_data
from runbook.records import Check, Measurement, Outcome, Reason, RunRecord
from runbook.records.measurement import MIB_PER_GIB, plain_number


@dataclass(frozen=True, kw_only=True)
class _Key:
    """A number of the first page: the check that has it, and how it is written.

    `measured` is the name that its measurement must have, where the check may show another number
    instead. `beside` names one that its phase measured beside the check, which decides nothing. A
    `share` is written in percent, and what is `mib` in GiB. Fewer `ranks` than this have no such
    number; `own` keeps it to trainers of one's own (true) or to ours (false). `bound` names the row
    of its phase that holds the limit, where its check has none. In the label `{end}` is the last
    step of production.
    """

    label: str
    check: str
    measured: str = ""
    beside: str = ""
    share: bool = False
    mib: bool = False
    bound: str = ""
    always: bool = False
    ranks: int = 1
    own: bool | None = None


KEYS = TypeAdapter(tuple[_Key, ...]).validate_python(shipped_data("report/key_numbers"))


@dataclass(frozen=True, kw_only=True)
class KeyNumber:
    """A number as text. `value` is empty where the run did not measure it; `why` says why then.

    One that is not `gated` is shown and never decides. `word` is its outcome to a reader: a choice
    that could be made is PASS, and says which.
    """

    label: str
    id: str
    outcome: str
    word: str
    gated: bool
    value: str
    interval: str
    limit: str
    basis: str
    files: tuple[str, ...]
    more_files: int
    why: str

    @property
    def fails(self) -> bool:
        """Does it keep the run from GO?"""
        return self.gated and self.outcome not in (Outcome.PASS, Outcome.SKIPPED)


def key_numbers(record: RunRecord) -> tuple[tuple[KeyNumber, ...], tuple[KeyNumber, ...]]:
    """What the run measured, and what a reader looks for that it did not, both in order."""
    checks = {check.id: check for check in record.checks()}
    skipped = {one.name for one in record.phases if one.outcome is Outcome.SKIPPED}
    keys = [replace(key, label=key.label.format(end=_end(record))) for key in _keys(record, checks)]
    beside = {(one.name, m.name): m for one in record.phases for m in one.measurements}
    found = [_key_number(key, checks, skipped, beside) for key in keys]
    always = {key.check for key in keys if key.always}
    missing = (one for one in found if not one.value and one.id in always)
    return tuple(one for one in found if one.value), tuple(missing)


def _keys(record: RunRecord, checks: Mapping[str, Check]) -> list[_Key]:
    """The numbers that a run of these ranks can have.

    A launch by a plan has them from the last of its own phases that measured one.
    """
    own = bool(record.profile_document.get("own_trainer"))
    keys = [key for key in KEYS if key.ranks <= _ranks(record) and key.own in (None, own)]
    made = [one.name for one in record.phases if _is_made(record, one.name)]
    if not made:
        return keys
    found = []
    for key in keys:
        row = key.check.partition(".")[2]
        ids = [f"{name}.{row}" for name in reversed(made)]
        told = [name for name in ids if name in checks and checks[name].measurement is not None]
        found += [replace(key, check=told[0])] if told else []
    return found


def _is_made(record: RunRecord, phase: str) -> bool:
    """Did the run's plan make this phase?"""
    settings = record.profile_document.get("phases")
    one = settings.get(phase) if isinstance(settings, dict) else None
    return isinstance(one, dict) and bool(one.get("stage"))


def _ranks(record: RunRecord) -> int:
    """How many ranks the profile trains with; a record that does not tell has what several have."""
    told = record.profile_document.get("ranks")
    return told if isinstance(told, int) else 2


def _end(record: RunRecord) -> str:
    """The last step of production in words."""
    workload = record.profile_document.get("workload")
    steps = workload.get("production_steps") if isinstance(workload, Mapping) else None
    return f"step {steps:,}" if isinstance(steps, int) else "the end of production"


def _key_number(
    key: _Key,
    checks: Mapping[str, Check],
    skipped: Container[str],
    beside: Mapping[tuple[str, str], Measurement],
) -> KeyNumber:
    check = checks.get(key.check)
    bound = checks.get(f"{key.check.partition('.')[0]}.{key.bound}") if key.bound else check
    measured = check.measurement if check else None
    if key.beside:
        measured = beside.get((key.check.partition(".")[0], key.beside))
        measured = measured if measured and measured.n > 1 else None
    elif measured is None or (key.measured and measured.name != key.measured):
        measured = None
    window = f", {measured.window}" if measured and measured.window else ""
    # The launches that it is from do not count, so that the check shows another number or none.
    found = check.measurement if check else None
    bad = check is not None and check.outcome not in (Outcome.PASS, Outcome.SKIPPED)
    other = bad and found is not None and measured is None and not key.beside
    uncounted = one_line(check.reason) if check and other else ""
    left_out = key.check.partition(".")[0] in skipped
    lacking = Outcome.SKIPPED if left_out else Outcome.INCOMPLETE
    why = "this phase was not asked for" if left_out else "this run has no such check"
    outcome = (check.outcome if check else lacking).value
    gated = not key.beside and (check is None or check.code is not Reason.NOT_GATED)
    return KeyNumber(
        label=key.label,
        id=key.check,
        outcome=outcome,
        word=((check and check.choice) or outcome) if gated else NOT_GATED_WORDS,
        gated=gated,
        value=_written(measured, key) if measured else "does not count" if other else "",
        interval=_interval(measured, key) if measured else "",
        limit=_limit(bound, key) if bound and not key.beside else "",
        basis=f"n={measured.n}{window}" if measured else uncounted,
        files=measured.named[0] if measured else (),
        more_files=measured.named[1] if measured else 0,
        why=one_line(check.reason) if check else why,
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _number(value: float | str | bool | None, key: _Key) -> str:
    if key.share and isinstance(value, float):
        return _percent(value)
    if key.mib and isinstance(value, float):
        value /= MIB_PER_GIB
    return shown_value(value)


def _written(measured: Measurement, key: _Key) -> str:
    unit = "" if key.share else "GiB" if key.mib else one_line(measured.unit)
    return f"{_number(measured.value, key)} {unit}".rstrip()


def _interval(measured: Measurement, key: _Key) -> str:
    if measured.interval is None:
        return f"± {plain_number(measured.stdev)}" if measured.stdev is not None else ""
    low, high = measured.interval
    return f"{_number(low, key)} to {_number(high, key)}"


def _limit(check: Check, key: _Key) -> str:
    if check.limit is None or (key.bound and check.code is Reason.NOT_GATED):
        return ""
    if key.share and isinstance(check.limit, float):
        return f"{check.comparator.value} {_percent(check.limit)}"
    return limit_text(check)
