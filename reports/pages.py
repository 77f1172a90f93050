"""The pages of a run: `report.md` to read first, `details.md` for the rest, `report.html` for both.

On the first one stand the numbers that decided, the settings, the machine and the two tables, all
taken from the record. No page needs anything from outside; style and script of the HTML stand in
it.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

from markupsafe import Markup
from pydantic import TypeAdapter

from reports.cases import accused_of
from reports.causes import values_before
from reports.plots import Interval, Timeline, Traces
from reports.text import (
    NOT_GATED_WORDS,
    export_line,
    limit_text,
    one_line,
    shown_value,
    template_environment,
)
from reports.view import build_view, permit_of, run_folder
from runbook.config.precedence import told
from runbook.errors import counted
from runbook.files import shipped_data
from runbook.records import (
    Check,
    Measurement,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Series,
    Table,
)
from runbook.records.measurement import MIB_PER_GIB, Scalar, plain_number
from runbook.records.run import Report, Screen

# What a reader looks for first stands on top of the page.
_TILES = 4
# The documents ask for these two tables, in this shape.
TABLE_PHASES = ("bucket_sweep", "fused_adamw")
_TABLE_COLUMNS = 5


@dataclass(frozen=True, kw_only=True)
class SmallTable:
    """A table cut to what the first page needs; `path` is the file that all its rows are from.

    `note`: which row was chosen, and why.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    path: str
    note: str


def _tables(record: RunRecord) -> Iterator[SmallTable]:
    """The first table of each of the two phases, without the columns that only a machine reads."""
    for phase in record.phases:
        if phase.name in TABLE_PHASES and phase.tables and _has_numbers(phase.tables[0]):
            yield _small(phase.tables[0], phase)


def _has_numbers(table: Table) -> bool:
    """Has any row a number that is shown? A phase that did not run has none."""
    return any(isinstance(cell, float) for row in table.rows for cell in row[:_TABLE_COLUMNS])


def _small(table: Table, phase: PhaseRecord) -> SmallTable:
    chosen = phase.choices.get(table.columns[0])
    decides = {f"{phase.name}.best", f"{phase.name}.keep"}
    why = next((one_line(check.reason) for check in phase.checks if check.id in decides), "")
    told = f"Chosen: {table.columns[0]}={chosen}. " if chosen else ""
    sources = {str(row[-1]) for row in table.rows} if table.columns[-1] == "source" else set()
    width = min(_TABLE_COLUMNS, len(table.columns))
    return SmallTable(
        title=table.title,
        columns=table.columns[:width],
        rows=tuple(_marked(row[:width], chosen) for row in table.rows),
        path=sources.pop() if len(sources) == 1 else "",
        note=f"{told}{why}",
    )


def _marked(row: tuple[Scalar | None, ...], chosen: str | None) -> tuple[str, ...]:
    """The cells as text, the first one marked where its row was chosen."""
    first, *others = map(shown_value, row)
    return (f"{first} (chosen)" if first == chosen else first, *others)


def run_facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Machine, software, model and how the run was asked for, one line each."""
    known = record.environment
    machine = [_processor(record), _gpus(known), _with(known, "cpu.count", "{} CPUs")]
    machine += [_memory(known), known.get("system", "")]
    yield from _told("Machine", *machine)
    versions = [_with(known, "torch.version", "torch {}"), _with(known, "torch.cuda", "CUDA {}")]
    versions += [_with(known, "gpu.driver", "driver {}"), _with(known, "python", "Python {}")]
    yield from _told("Software", *versions, f"runbook {record.tool_version}")
    yield from _told("Commit", _commit(known))
    yield from _told("Model", *_workloads(record), between="; ")
    # A trainer of one's own has no config of ours, though its profile extends one that has.
    config = "" if record.of_own_trainer else str(record.profile_document.get("config", ""))
    yield from _told("Profile", record.profile, config)
    given = told(record.settings, record.sources, values_before(record))
    yield from _told("Set by hand", *given, between="; ")
    for what, listed in filter(None, map(counted, record.caveats)):
        yield from _told(what.capitalize(), listed)


def _told(name: str, *texts: str, between: str = ", ") -> Iterator[tuple[str, str]]:
    if told := between.join(one_line(text) for text in texts if text):
        yield name, told


def _with(known: dict[str, str], name: str, words: str) -> str:
    return words.format(known[name]) if known.get(name) else ""


def _memory(known: dict[str, str]) -> str:
    number, _, unit = known.get("memory.total_gib", "").partition(" ")
    try:
        return f"{float(number):.3g} {unit} memory"
    except ValueError:
        return ""  # not collected


def _gpus(known: dict[str, str]) -> str:
    """`2 x NVIDIA A100 80GB PCIe` of a list of names."""
    counted = Counter(name for name in known.get("gpu.names", "").split(", ") if name)
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counted.items())


def _processor(record: RunRecord) -> str:
    """The processor that a run on a CPU trained on; GPUs are named by the driver."""
    names = {ran.name for phase in record.phases for ran in phase.ran if ran.device == "cpu"}
    return ", ".join(sorted(names - {""}))


def _commit(known: dict[str, str]) -> str:
    commit = known.get("git.sha", "")
    if not commit:
        return ""
    branch = _with(known, "git.branch", " on {}")
    dirty = {"True": ", with changes that are not committed", "False": ", clean"}
    return f"{commit[:12]}{branch}{dirty.get(known.get('git.dirty', ''), '')}"


def _workloads(record: RunRecord) -> Iterator[str]:
    """Every different model and batch, with the numbers of ranks that it ran on."""
    ranks: dict[str, dict[int, None]] = {}
    for ran in (ran for phase in record.phases for ran in phase.ran):
        size = f"{ran.parameters / 1e6:.3g}M parameters"
        batch = f"batch {ran.global_batch} x {ran.accumulation}"
        ranks.setdefault(f"{size}, S={ran.seq_len}, {batch}, {ran.dtype}", {})[ran.ranks] = None
    for words, counts in ranks.items():
        several = "" if list(counts) == [1] else "s"
        yield f"{words} on {' and '.join(map(str, counts))} rank{several}"


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


KEYS = TypeAdapter(tuple[_Key, ...]).validate_python(shipped_data("report/key_numbers"))


@dataclass(frozen=True, kw_only=True)
class KeyNumber:
    """A number as text; `value` is empty where the run did not measure it.

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

    @property
    def fails(self) -> bool:
        """Does it keep the run from GO?"""
        return self.gated and self.outcome not in (Outcome.PASS, Outcome.SKIPPED)


def key_numbers(record: RunRecord) -> tuple[KeyNumber, ...]:
    """What the run measured, in order."""
    checks = {check.id: check for check in record.checks()}
    keys = [replace(key, label=key.label.format(end=_end(record))) for key in _keys(record, checks)]
    beside = {(one.name, m.name): m for one in record.phases for m in one.measurements}
    found = (_key_number(key, checks, beside) for key in keys)
    return tuple(one for one in found if one.value)


def _keys(record: RunRecord, checks: Mapping[str, Check]) -> list[_Key]:
    """The numbers that a run of these ranks can have.

    A launch by a plan has them from the last of its own phases that measured one.
    """
    mine = (None, record.of_own_trainer)
    keys = [key for key in KEYS if key.ranks <= _ranks(record) and key.own in mine]
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
    key: _Key, checks: Mapping[str, Check], beside: Mapping[tuple[str, str], Measurement]
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
    outcome = (check.outcome if check else Outcome.INCOMPLETE).value
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
    )


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.3g} %"


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


# -- the pages themselves --------------------------------------------------------------------------


def render_markdown(record: RunRecord, _: Screen) -> str:
    """Return `report.md`: what decided, what to use and what to do, on one or two pages."""
    return _markdown("report.md.j2", record)


def render_details(record: RunRecord, _: Screen) -> str:
    """Return `details.md`: every check, table, launch, note, setting and file."""
    return _markdown("details.md.j2", record)


def _markdown(template: str, record: RunRecord) -> str:
    page = template_environment(html=False).get_template(template)
    return page.render(**_told_by_all(record))


def _told_by_all(record: RunRecord) -> dict[str, Any]:
    """What every page has of a run."""
    numbers = key_numbers(record)
    return {
        "run": record,
        "view": build_view(record),
        "permit": permit_of(record),
        "nodes": accused_of(record),
        # What failed stands first, as far as it was measured.
        "tiles": sorted(numbers, key=lambda one: not one.fails)[:_TILES],
        "numbers": numbers,
        "small_tables": list(_tables(record)),
        "facts": list(run_facts(record)),
        # A line for a shell, to be shown only if the run is GO.
        "exports": export_line(record.exports),
        "folder": run_folder(record),
    }


def render_html(record: RunRecord, _: Screen) -> str:
    """Return `report.html`: one file, light and dark, on paper, readable on a phone."""
    style, script = _own("report.css.j2"), _own("report.js.j2")
    page = template_environment(html=True).get_template("report.html.j2")
    return page.render(
        **_told_by_all(record),
        figures=figures(record),
        style=style,
        script=script,
        allowed_style=_allowed(style),
        allowed_script=_allowed(script),
    )


# `kind` is timeline, interval, or the group of the curves (throughput, loss, memory, tensors,
# gates); trace where a curve has none. `phase` is empty for the whole run.
Figure = Timeline | Interval | Traces


def figures(record: RunRecord) -> tuple[Figure, ...]:
    """Every picture of the run: first its course, then phase by phase what decided."""
    of_phases = (one for phase in record.phases for one in _of(phase))
    return tuple(one for one in (Timeline(record), *of_phases) if not one.empty)


def _of(phase: PhaseRecord) -> Iterator[Interval | Traces]:
    """What decided, and the curves that share a scale; one without a group stands alone."""
    yield from map(Interval, phase.checks)
    groups: dict[tuple[str, str], list[Series]] = {}
    for curve in phase.series:
        groups.setdefault((curve.group, "" if curve.group else curve.name), []).append(curve)
    yield from (Traces(phase.name, group, curves) for (group, _), curves in groups.items())


@lru_cache(maxsize=2)
def _own(template: str) -> Markup:
    """Style or script of the page; these templates take no value of any record."""
    return Markup(template_environment(html=True).get_template(template).render())  # noqa: S704


def _allowed(text: str) -> str:
    """The source expression by which a Content-Security-Policy allows exactly this text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


HTML = Report(file_name="report.html", render=render_html)
MARKDOWN = Report(file_name="report.md", render=render_markdown)
DETAILS = Report(file_name="details.md", render=render_details)
