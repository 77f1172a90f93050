"""Every kind of command that red runs print, on a page or a terminal, is executed as printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runbook.records import RunRecord
from tests.cli.shell import Ended
from tests.reports.printed import commands_of, kind_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# The trainer refuses this model, which costs no training: it is over before a model is built.
_REFUSED = "model.n_heads=5"
_PROFILE = """\
extends: cpu
required: [v2_parity.parity, nvtx.completed]
"""
_TOLD = re.compile(r"^ +(?:rerun|add|resume) +(runbook .*)$", re.MULTILINE)


@dataclass
class Shell:
    """A folder in which commands are typed; knows what was printed and what was executed."""

    folder: Path
    executed: set[tuple[str, ...]] = field(default_factory=set)
    printed: dict[str, None] = field(default_factory=dict)

    def type(self, line: str, *, interrupted: bool = False) -> Ended:
        """Execute a line as a shell does, with this Python's programs first on PATH.

        `interrupted`: Ctrl-C as soon as the run that it starts has a launch.
        """
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
        before = set(self.folder.glob("artifacts/*"))
        process = subprocess.Popen(
            ["sh", "-c", f"exec env {line}" if interrupted else line], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**kept, "PATH": programs, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        while interrupted and process.poll() is None:
            new = set(self.folder.glob("artifacts/*")) - before
            if any(list(folder.glob("*/*/launch.json")) for folder in new):
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.05)
        out, err = process.communicate(timeout=400)
        self.executed.add(kind_of(line))
        self.printed |= dict.fromkeys(_TOLD.findall(out))
        return Ended(code=process.returncode, out=out, err=err)

    def newest(self) -> RunRecord:
        """The record of the newest run; what its pages print is noted."""
        folder = max((self.folder / "artifacts").iterdir(), key=lambda path: path.name)
        record = RunRecord.model_validate_json((folder / "run.json").read_text("utf-8"))
        self.printed |= commands_of(record)
        return record

    def only(self, *starts: str) -> str:
        """The one printed command that begins with one of these."""
        found = [line for line in self.printed if line.startswith(starts)]
        assert len(found) == 1, found
        return found[0]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A run that passes what it is asked for, goes on as its last lines say, and fails."""
    shell = Shell(tmp_path_factory.mktemp("typed"))
    (shell.folder / "short.yaml").write_text(_PROFILE, encoding="utf-8")
    # A page prints the commands of launches for a checkout.
    (shell.folder / "configs").symlink_to(ROOT / "configs")
    first = shell.type(f"runbook run --phase v2_parity --profile short.yaml --set {_REFUSED}")
    assert first.code == 4, first.out
    assert shell.newest().verdict == "PARTIAL PASS"
    added = shell.type(shell.only("runbook run --resume"))
    assert added.code == 3, added.out
    assert [phase.name for phase in shell.newest().phases] == ["v2_parity", "nvtx"]
    return shell


def test_every_kind_of_command_that_a_red_run_prints_does_what_it_says(shell: Shell) -> None:
    """The last one is interrupted, and goes on as its own page says."""
    before = shell.newest()
    verified = shell.type(shell.only("runbook verify "))
    assert (verified.code, "nothing differs" in verified.out) == (0, True), verified.out
    tests = shell.type(shell.only("OMP_NUM_THREADS=1 NSA_TEST_SEL_PACK=1 python -m pytest"))
    assert (tests.code, " passed" in tests.out) == (0, True), tests.out
    trainer = shell.type(shell.only("NSA_PREFILL_BATCHED=1"))
    assert trainer.code != 0 and "n_heads=5 is not a multiple" in trainer.out + trainer.err
    exported = shell.type("\n".join(line for line in shell.printed if line.startswith("export ")))
    assert exported.code == 0
    assert shell.type(shell.only("runbook run --phase nvtx "), interrupted=True).code == 130
    cut = shell.newest()
    assert cut.interrupted and cut.run_id != before.run_id
    resumed = shell.type(shell.only(f"runbook run --resume artifacts/{cut.run_id}"))
    assert resumed.code == 3, resumed.out
    after = shell.newest()
    assert after.run_id == cut.run_id
    codes = [{check.code for check in run.phases[-1].checks} for run in (before, after)]
    assert codes[0] == codes[1] and "wrong_environment" in codes[0]
    assert {kind_of(line) for line in shell.printed if line} <= shell.executed
