"""The numbers of a run's first page, of which configs/report/key_numbers.yaml says the labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from reports.text import NOT_GATED_WORDS, limit_text, one_line, shown_value
from runbook.files import shipped_data
from runbook.records import Check, Measurement, Outcome, Reason, RunRecord
from runbook.records.measurement import MIB_PER_GIB, plain_number

_WELL = (Outcome.PASS, Outcome.SKIPPED)


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
    ranks: int = 1
    own: bool | None = None

    def value(self, measured: Measurement) -> str:
        """The number with its unit."""
        unit = "" if self.share else "GiB" if self.mib else one_line(measured.unit)
        return f"{self._number(measured.value)} {unit}".rstrip()

    def interval(self, measured: Measurement) -> str:
        """`840 to 852`; its standard deviation, where it has no interval."""
        if measured.interval is None:
            return f"± {plain_number(measured.stdev)}" if measured.stdev is not None else ""
        return " to ".join(map(self._number, measured.interval))

    def limit(self, check: Check) -> str:
        """The limit of the check that holds it."""
        if check.limit is None or (self.bound and check.code is Reason.NOT_GATED):
            return ""
        if self.share and isinstance(check.limit, float):
            return f"{check.comparator.value} {self._number(check.limit)}"
        return limit_text(check)

    def _number(self, value: float | str | bool | None) -> str:
        if isinstance(value, float) and self.share:
            return "-" if math.isnan(value) else f"{100 * value:.3g} %"
        return shown_value(value / MIB_PER_GIB if isinstance(value, float) and self.mib else value)


KEYS = TypeAdapter(tuple[_Key, ...]).validate_python(shipped_data("report/key_numbers"))


@dataclass(frozen=True, kw_only=True)
class KeyNumber:
    """A number as text. One that is not `gated` is shown and never decides.

    `word` is its outcome to a reader: a choice that could be made is PASS, and says which. `named`
    are its files, and how many more there are.
    """

    label: str
    id: str
    outcome: Outcome
    word: str
    gated: bool
    value: str
    interval: str = ""
    limit: str
    basis: str
    named: tuple[tuple[str, ...], int] = ((), 0)

    @property
    def fails(self) -> bool:
        """Does it keep the run from GO?"""
        return self.gated and self.outcome not in _WELL


def key_numbers(record: RunRecord) -> tuple[KeyNumber, ...]:
    """What the run measured, in order."""
    checks = {check.id: check for check in record.checks()}
    beside = {(one.name, m.name): m for one in record.phases for m in one.measurements}
    found = (_key_number(key, checks, beside) for key in _keys(record, checks))
    return tuple(one for one in found if one is not None)


def _keys(record: RunRecord, checks: Mapping[str, Check]) -> Iterator[_Key]:
    """The numbers that a run of these ranks can have.

    A launch by a plan has them from the last of its own phases that measured one.
    """
    ranks = record.profile_document.get("ranks")
    # A record that does not tell has what several ranks have.
    most = ranks if isinstance(ranks, int) else 2
    steps = record.of_profile("workload").get("production_steps")
    end = f"step {steps:,}" if isinstance(steps, int) else "the end of production"
    made = [one.name for one in record.phases if record.of_profile("phases", one.name, "stage")]
    for key in KEYS:
        row = key.check.partition(".")[2]
        ids = [f"{name}.{row}" for name in reversed(made)] if made else [key.check]
        told = [one for one in ids if one in checks and (checks[one].measurement or not made)]
        if key.ranks <= most and key.own in (None, record.of_own_trainer) and told:
            yield replace(key, check=told[0], label=key.label.format(end=end))


def _key_number(
    key: _Key, checks: Mapping[str, Check], beside: Mapping[tuple[str, str], Measurement]
) -> KeyNumber | None:
    """None where the run did not measure it."""
    check = checks[key.check]
    bound = checks.get(f"{check.phase}.{key.bound}") if key.bound else check
    measured = beside.get((check.phase, key.beside)) if key.beside else check.measurement
    if measured is None or (key.beside and measured.n < 2):
        return None
    gated = not key.beside and check.code is not Reason.NOT_GATED
    window = f", {measured.window}" if measured.window else ""
    told = KeyNumber(
        label=key.label,
        id=check.id,
        outcome=check.outcome,
        word=(check.choice or check.outcome.value) if gated else NOT_GATED_WORDS,
        gated=gated,
        value=key.value(measured),
        interval=key.interval(measured),
        limit=key.limit(bound) if bound and not key.beside else "",
        basis=f"n={measured.n}{window}",
        named=measured.named,
    )
    if key.measured in ("", measured.name):
        return told
    # The launches that it is from do not count, so that the check shows another number.
    uncounted = replace(told, value="does not count", interval="", basis=one_line(check.reason))
    return None if check.outcome in _WELL else replace(uncounted, named=((), 0))
