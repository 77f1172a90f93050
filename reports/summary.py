"""The first page of a run: the numbers that decided, the settings, the machine, the two tables.

Everything is taken from the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reports.advice import values_before
from reports.key_numbers import KeyNumber, key_numbers
from reports.text import export_line, one_line, shown_value
from reports.view import ReportView, run_folder
from runbook.config.precedence import told
from runbook.records import Outcome, PhaseRecord, RunRecord, Table
from runbook.records.measurement import Scalar
from runbook.text import counted

# What a reader looks for first stands on top of the page, whether or not it was measured.
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


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What stands on the first page, in its order. `unmeasured` names what has no tile, and why.

    `exports` is a line for a shell, to be shown only if the run is GO.
    """

    tiles: tuple[KeyNumber, ...]
    unmeasured: str
    numbers: tuple[KeyNumber, ...]
    exports: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[SmallTable, ...]
    folder: str
    words: str


def summarize(view: ReportView) -> Summary:
    """The first page of this run."""
    record = view.record
    numbers, missing = key_numbers(record)
    # What failed stands first, as far as it was measured.
    tiles = sorted(numbers, key=lambda one: not one.fails)
    return Summary(
        tiles=tuple(tiles[:_TILES]),
        unmeasured=_unmeasured(missing),
        numbers=numbers,
        exports=export_line(record.exports),
        facts=tuple(run_facts(record)),
        tables=tuple(_tables(record)),
        folder=run_folder(record),
        words=" ".join(filter(None, (view.words, _terms(record, numbers)))),
    )


def _unmeasured(missing: Sequence[KeyNumber]) -> str:
    """What has no value, apart from what was not asked for."""
    left_out = [one.label for one in missing if one.outcome == Outcome.SKIPPED]
    others = [one.label for one in missing if one.label not in left_out]
    told = {"Not measured": others, "Not asked for": left_out}
    return " ".join(f"{how}: {', '.join(labels)}." for how, labels in told.items() if labels)


def _terms(record: RunRecord, numbers: Sequence[KeyNumber]) -> str:
    """Words of the page that a reader may not know."""
    if not record.phases:
        return ""
    told = ["A rank is one training process", "S is the sequence length in tokens"]
    told += ["batch A x B is A sequences a step, accumulated B times"]
    if any(not one.gated for one in numbers):
        told.append("not gated: no limit applies on this profile")
    return f"{'; '.join(told)}."


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
    own = record.profile_document.get("own_trainer")
    config = "" if own else str(record.profile_document.get("config", ""))
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
