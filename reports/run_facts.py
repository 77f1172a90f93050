"""What a run was made with: machine, software, commit, model, and how it was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from reports.advice import values_before
from reports.view import one_line
from runbook.config.precedence import told
from runbook.records import RunRecord
from runbook.text import counted


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
    yield from _told("Profile", record.profile, str(record.profile_document.get("config", "")))
    yield from _told("Set by hand", *_set_by_hand(record), between="; ")
    for what, listed in filter(None, map(counted, record.caveats)):
        yield from _told(what.capitalize(), listed)


def _set_by_hand(record: RunRecord) -> Iterator[str]:
    """Each setting that a person gave, with its source and what it replaced."""
    yield from told(record.settings, record.sources, values_before(record))


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
