"""All preflight collectors in one call: the files that they write, and the facts in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from nsa.contract.digests import package_digest
from runbook.config.settings import environment_notes, environment_problems
from runbook.folder.facts import finish, recorded_environment, redact_diff, redact_text
from runbook.machine import git, host
from runbook.machine.gpu.facts import collect_gpus
from runbook.machine.host import DEFAULT_RENDEZVOUS_PORT, Seen, TorchFacts, ask_torch, find_trainers
from runbook.machine.identity import package_folders, startup_code
from runbook.process import NO_VARIABLES
from runbook.records.evidence import Fact
from runbook.text import listed

_HOST = "host.json"
_OBSERVED_S = 0.25
_COLLECT_ENV = "collect_env.txt"
_SHA = "git_sha.txt"
_STATUS = "git_status.txt"
_DIFF = "git_diff.patch"


def collect_preflight(
    run_root: Path,
    *,
    expected_branch: str | None,
    note: Callable[[str], None],
    trainer: str = "nsa.train",
    variables: Mapping[str, str] = NO_VARIABLES,
    needs: tuple[str, str] | None = None,
) -> dict[str, Fact]:
    """Describe checkout, torch, GPUs and host; write the artifacts into `run_root`.

    `variables` are those of CUDA that every launch will get: they decide which GPUs count. `needs`
    says what the launches need and lack, and what they have, where that was looked at. A fact
    that this machine does not have is there with value None and a note that says why.
    `note` is told what is being asked, which takes seconds.
    Raises OSError if `run_root` cannot be written.
    """
    note("preflight: checkout")
    drafts = _git_drafts(run_root, expected_branch) + _package_drafts()
    note("preflight: torch and trainer (imports both, takes seconds)")
    answers = ask_torch(trainer=trainer, cwd=run_root, variables=variables)
    drafts += _torch_drafts(run_root, answers)
    note("preflight: GPUs, disk, ports, processes")
    drafts += collect_gpus(
        run_root,
        torch_count=answers.device_count,
        torch_uuids=answers.uuids,
        environment={**os.environ, **variables},
        host_file=_HOST,
    )
    drafts += _host_drafts(run_root)
    drafts += load_drafts()
    drafts += _process_drafts(find_trainers(trainer=trainer))
    drafts += _variable_drafts(uses_nccl=bool(answers.cuda_available))
    drafts += [] if needs is None else [_fact("needs.missing", *map(redact_text, needs))]
    _write_host(run_root, drafts)
    return finish(drafts, run_root)


def _fact(name: str, value: str | float | bool | None, note: str = "", *, unit: str = "") -> Fact:
    return Fact(name=name, value=value, unit=unit, path=_HOST, note=note)


def _git_drafts(run_root: Path, expected_branch: str | None) -> list[Fact]:
    checkout = git.find_checkout()
    if checkout is None:
        note = git.why_no_checkout()
        for name in (_SHA, _STATUS, _DIFF):
            _write(run_root / name, "")
        return [
            Fact(name=f"git.{key}", value=None, path=_SHA, note=note)
            for key in ("branch", "behind", "sha", "dirty", "diff_sha256")
        ]
    state = git.read_git(checkout)
    _write(run_root / _SHA, f"{state.sha}\n" if state.sha else "")
    elsewhere = _imported_from_elsewhere(checkout)
    changed = [*state.changed, *elsewhere]
    _write(run_root / _STATUS, "".join(f"{line}\n" for line in changed))
    _write(run_root / _DIFF, redact_diff(state.diff))
    branch_notes = [] if state.branch else ["detached HEAD"]
    branch_notes += [f"expected {expected_branch}"] if expected_branch else []
    where = "; ".join(state.problems) or f"in {checkout}"
    dirt = f"{len(changed)} files differ from the commit or are not in it" if changed else ""
    dirt = "; ".join(filter(None, (dirt, listed([*elsewhere, *state.unseen], between="; "))))
    upstream = f"of {state.upstream}, as last fetched" if state.upstream else "no upstream branch"
    digest = "digest of the whole diff; secrets in the kept copy are blanked"
    return [
        _fact("git.branch", state.branch, ", ".join(branch_notes)),
        _fact("git.behind", state.behind, upstream, unit="commits"),
        Fact(name="git.sha", value=state.sha, path=_SHA, note=where),
        Fact(name="git.dirty", value=bool(changed), path=_STATUS, note=dirt),
        Fact(name="git.diff_sha256", value=state.diff_sha256, path=_DIFF, note=digest),
    ]


def _imported_from_elsewhere(checkout: Path) -> list[str]:
    """Packages that the checkout has and that are imported from another place."""
    return [
        f"{name} is imported from {folder}, not from {checkout}"
        for name, folder in package_folders().items()
        if (checkout / name / "__init__.py").is_file() and folder != (checkout / name).resolve()
    ]


def _torch_drafts(run_root: Path, answers: TorchFacts) -> list[Fact]:
    _write(run_root / _COLLECT_ENV, redact_text(answers.collect_env or answers.problem) + "\n")
    note = redact_text(answers.problem)
    torch = {
        "torch.version": answers.version,
        "torch.cuda_available": answers.cuda_available,
        "torch.device_count": answers.device_count,
    }
    without = note or ("" if answers.cuda else "this torch was built without CUDA")
    return [
        _fact("trainer.imports", answers.trainer_imports, redact_text(answers.trainer_error)),
        *(Fact(name=n, value=value, path=_COLLECT_ENV, note=note) for n, value in torch.items()),
        Fact(name="torch.cuda", value=answers.cuda, path=_COLLECT_ENV, note=without),
        _fact("torch.nccl", answers.nccl, note or ("" if answers.nccl else "torch sees no GPU")),
    ]


def _host_drafts(run_root: Path) -> list[Fact]:
    holder = host.port_holder()
    infiniband = host.find_infiniband()
    ports = ", ".join(f"{name} {state}" for name, state in infiniband.items())
    port = f"port {DEFAULT_RENDEZVOUS_PORT}" + (f" held by {holder}" if holder else "")
    return [
        _fact("infiniband.present", bool(infiniband), ports),
        _fact("disk.free_gib", shutil.disk_usage(run_root).free / 1024**3, unit="GiB"),
        _write_speed_draft(run_root),
        _fact("port.free", holder is None, port),
        _fact("cpu.count", host.count_cpus()),
        _fact("memory.total_gib", host.memory_total_gib(), unit="GiB"),
    ]


def _write_speed_draft(run_root: Path) -> Fact:
    try:
        speed, note = host.write_speed_mib_s(run_root), "64 MiB written and synced once"
    except OSError as error:
        speed, note = None, f"writing the probe file failed: {error.strerror or error}"
    return _fact("disk.write_mib_s", speed, note, unit="MiB/s")


def _process_drafts(processes: Sequence[Seen]) -> list[Fact]:
    drafts = []
    for name, orphan in (("processes.leftover", True), ("processes.other_runs", False)):
        chosen = [process for process in processes if process.orphan == orphan]
        drafts.append(_fact(name, len(chosen), redact_text(listed(chosen, between="; "))))
    return drafts


def _variable_drafts(*, uses_nccl: bool) -> list[Fact]:
    problems = environment_problems(os.environ, uses_nccl=uses_nccl)
    notes = environment_notes(os.environ, uses_nccl=uses_nccl)
    told = "; ".join(f"{name}={os.environ[name]}: {note}" for name, note in notes.items())
    return [
        _fact("env.problems", redact_text("; ".join(problems)), redact_text(told)),
    ]


def _package_drafts() -> list[Fact]:
    """Where the package under test lies, as the harness would import it."""
    folder = package_folders()["nsa"]
    code = "; ".join(startup_code())
    return [
        _fact("package.path", str(folder)),
        _fact("package.sha256", package_digest(folder)),
        _fact("python.startup", redact_text(code), "" if code else "nothing beside Python's own"),
    ]


def _write_host(run_root: Path, drafts: Sequence[Fact]) -> None:
    document = {
        "schema_version": 1,
        "facts": {
            draft.name: {"value": draft.value, "unit": draft.unit, "note": draft.note}
            for draft in drafts
        },
        "environment": recorded_environment(),
    }
    _write(run_root / _HOST, json.dumps(document, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def load_drafts(root: Path = Path("/")) -> list[Fact]:
    """Shared memory below `root`, and what else keeps processors busy; takes a quarter of a second.

    Without a /dev/shm its facts have no value, and say why.
    """
    busy, cores = psutil.cpu_percent(interval=_OBSERVED_S) / 100, psutil.cpu_count() or 1
    loaded = round(os.getloadavg()[0] / host.count_cpus(), 3)
    drafts = [
        _fact("host.load_per_cpu", loaded, "mean of the last minute"),
        _fact("host.busy_cpus", round(busy * cores, 2), f"of {cores}", unit="CPUs"),
    ]
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError as error:
        why = f"{error.filename}: {error.strerror or error}"
        return [*drafts, _fact("host.shm_gib", None, why), _fact("host.shm_free_gib", None, why)]
    sizes = {"host.shm_gib": usage.total, "host.shm_free_gib": usage.free}
    return [*drafts, *(_fact(name, round(n / 1024**3, 3), unit="GiB") for name, n in sizes.items())]
