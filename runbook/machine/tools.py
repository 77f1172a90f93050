"""Ask a tool, and note a fact: what every collector does.

A tool is run without a shell and without secrets in its environment, for a limited time, and
never raises. A fact is a draft until the file that it was read from is whole.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from nsa.contract import is_secret_name
from runbook.records.evidence import Fact

# The default of who sets no variables besides those that are there.
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


_KILLED_WITHIN_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A fact whose file may still grow. None needs a note that says why there is no value."""

    name: str
    value: str | float | bool | None
    file: str
    unit: str = ""
    note: str = ""


def finish(drafts: Iterable[Draft], run_root: Path) -> dict[str, Fact]:
    """Facts with the digest of the file that holds them.

    Raises RuntimeError for a name that occurs twice, or a missing value without its reason.
    """
    facts: dict[str, Fact] = {}
    digests: dict[str, str] = {}
    for draft in drafts:
        if draft.name in facts:
            raise RuntimeError(f"two facts are called {draft.name}")
        if draft.value is None and not draft.note:
            raise RuntimeError(f"fact {draft.name} has no value and no note that says why")
        if draft.file not in digests:
            content = (run_root / draft.file).read_bytes()
            digests[draft.file] = hashlib.sha256(content).hexdigest()
        facts[draft.name] = Fact(
            name=draft.name,
            value=draft.value,
            unit=draft.unit,
            path=draft.file,
            sha256=digests[draft.file],
            note=draft.note,
        )
    return facts


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a tool printed; `problem` is empty if it ran and exited with 0."""

    stdout: str
    stderr: str
    problem: str

    @property
    def ok(self) -> bool:
        """True if the tool finished without an error."""
        return not self.problem


def run_tool(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    errors: str = "replace",
    variables: Mapping[str, str] = NO_VARIABLES,
    without: Container[str] = (),
    only: bool = False,
) -> ToolResult:
    """Run `argv` in a session of its own; on a timeout the whole session is killed.

    `variables` are set besides those of this process; those named in `without` are not passed on.
    `only`: `variables` are all that is set.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not only and not is_secret_name(name) and name not in without
    }
    environment |= variables
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment,
            text=True,
            errors=errors,
            start_new_session=True,
        )
    except OSError as error:
        return ToolResult(stdout="", stderr="", problem=f"{argv[0]}: {error.strerror or error}")
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return _gave_up(process, f"{argv[0]}: no answer within {timeout_s:g} s")
    except BaseException:
        _gave_up(process, "")
        raise
    problem = _exit_problem(argv[0], process.returncode, stderr)
    return ToolResult(stdout=stdout, stderr=stderr, problem=problem)


def _gave_up(process: subprocess.Popen[str], problem: str) -> ToolResult:
    """Kill the tool's session; one that hangs in a driver cannot be, and is not waited for."""
    with suppress(ProcessLookupError):  # it ended by itself while an interrupt was on its way
        os.killpg(process.pid, signal.SIGKILL)
    try:
        stdout, stderr = process.communicate(timeout=_KILLED_WITHIN_S)
    except subprocess.TimeoutExpired:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.poll()
        return ToolResult(stdout="", stderr="", problem=f"{problem}, and it does not end")
    return ToolResult(stdout=stdout, stderr=stderr, problem=problem)


def _exit_problem(name: str, code: int, stderr: str) -> str:
    if code == 0:
        return ""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return f"{name}: exit code {code}{': ' + lines[-1] if lines else ''}"
