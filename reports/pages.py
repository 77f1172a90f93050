"""The pages of a run: `report.md` to read first, `details.md` for the rest, `report.html` for both.

On the first one stand the numbers that decided, the settings, the machine and the two tables, all
taken from the record. No page needs anything from outside; style and script of the HTML stand in
it.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any

from markupsafe import Markup

from reports.cases import accused_of
from reports.causes import values_before
from reports.numbers import key_numbers
from reports.plots import figures
from reports.text import export_line, one_line, shown_value, template_environment
from reports.view import build_view, permit_of, run_folder
from runbook.config.precedence import told
from runbook.errors import counted
from runbook.records import PhaseRecord, RunRecord, Table
from runbook.records.measurement import Scalar
from runbook.records.run import Report, Screen

# What a reader looks for first stands on top of the page.
_TILES = 4
# The documents ask for these two tables, in this shape.
TABLE_PHASES = ("bucket_sweep", "fused_adamw")
_TABLE_COLUMNS = 5


def _tables(record: RunRecord) -> Iterator[tuple[Table, str]]:
    """The first table of each of the two phases, without the columns that only a machine reads.

    With the file that all its rows are from; empty if there are several.
    """
    for phase in record.phases:
        if phase.name in TABLE_PHASES and phase.tables and _has_numbers(phase.tables[0]):
            yield _small(phase.tables[0], phase)


def _has_numbers(table: Table) -> bool:
    """Has any row a number that is shown? A phase that did not run has none."""
    return any(isinstance(cell, float) for row in table.rows for cell in row[:_TABLE_COLUMNS])


def _small(table: Table, phase: PhaseRecord) -> tuple[Table, str]:
    """The table cut to what the first page needs; its note: which row was chosen, and why."""
    chosen = phase.choices.get(table.columns[0])
    decides = {f"{phase.name}.best", f"{phase.name}.keep"}
    why = next((one_line(check.reason) for check in phase.checks if check.id in decides), "")
    told = f"Chosen: {table.columns[0]}={chosen}. " if chosen else ""
    sources = {str(row[-1]) for row in table.rows} if table.columns[-1] == "source" else set()
    cut = {
        "columns": table.columns[:_TABLE_COLUMNS],
        "rows": tuple(_marked(row[:_TABLE_COLUMNS], chosen) for row in table.rows),
        "note": f"{told}{why}",
    }
    return table.model_copy(update=cut), sources.pop() if len(sources) == 1 else ""


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


# -- the pages themselves --------------------------------------------------------------------------


def _markdown(template: str, record: RunRecord, _: Screen) -> str:
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


@lru_cache(maxsize=2)
def _own(template: str) -> Markup:
    """Style or script of the page; these templates take no value of any record."""
    return Markup(template_environment(html=True).get_template(template).render())  # noqa: S704


def _allowed(text: str) -> str:
    """The source expression by which a Content-Security-Policy allows exactly this text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


HTML = Report(file_name="report.html", render=render_html)
# What decided, what to use and what to do, on one or two pages.
MARKDOWN = Report(file_name="report.md", render=partial(_markdown, "report.md.j2"))
# Every check, table, launch, note, setting and file.
DETAILS = Report(file_name="details.md", render=partial(_markdown, "details.md.j2"))
