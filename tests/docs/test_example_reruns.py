"""The command that each red example prints is typed as it stands, and brings the same end again.

Paths aside: `/tmp/examples` is another folder here. Profiles of the examples' own have fewer steps
of a smaller model, so that what is wrong shows in seconds; the printed line is the same.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.examples.__main__ import EXAMPLES, Example, command, verdict_line
from runbook.cli import COMMANDS
from runbook.cli._parser import parse_all
from runbook.config.settings import parse_settings
from runbook.records import RunRecord
from tests import executed
from tests.cli.shell import Ended, environment
from tests.docs.test_examples import DOCS, ROOT
from tests.reports.printed import commands_in_output
from tests.shared import once

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RED = {example.name: example for example in EXAMPLES if example.exit_code in (1, 3)}
MADE_IN = "/tmp/examples"
_SOURCE = "a test"
# A step takes a hundredth of a second, and is as wrong as in the example.
_CONFIG = {
    "model": {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_v": 16},
    "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16, "phi": "avg"},
    "train": {"seq_len": 32},
}
_SMALL: dict[str, dict[str, Any]] = {
    "slow-config": {"baseline": {"steps": 12}},
    # As much memory in the last half as no run may need more there.
    "flattering-clock": {"baseline": {"steps": 300}},
    "leak": {"long_run": {"steps": 280}},
    "hang": {
        "baseline": {"env": {"NSA_WATCH_HEARTBEAT_STALL_S": {"value": "10", "source": _SOURCE}}}
    },
}


def rerun_line(report: Path) -> str:
    """The command that shows the first cause again."""
    text = report.read_text("utf-8")
    found = re.search(r"^- \*\*To see the failure again:\*\* `(runbook run .*)`$", text, re.M)
    assert found is not None
    return found[1]


def verdict_of(report: Path) -> str:
    """The verdict without its caveats: a smaller config is one."""
    return verdict_line(report).partition(",")[0]


def first_reason(report: Path) -> tuple[str, str]:
    """The check that decided, and its outcome: `baseline.throughput` and `FAIL`."""
    told = report.read_text("utf-8")
    found = re.search(r"^- ([A-Z]+) in `([a-z_.]+)`", told, re.MULTILINE)
    assert found is not None
    return found[2], found[1]


def asked(line: str) -> tuple[object, ...]:
    """What a line asks for, in whichever words: 1e6 is 1000000.0."""
    command, name, *words = shlex.split(line)
    args, problems = parse_all(COMMANDS[name].parser(), words)
    assert (command, problems) == ("runbook", [])
    return name, args.phase, args.profile, args.out, parse_settings(args.settings)


def make_smaller(example: Example, folder: Path) -> None:
    """The example's own profile, where its printed line names it."""
    command(example, folder)
    path = folder / f"{example.name}.yaml"
    if example.name not in _SMALL:
        assert not path.exists()
        return
    config = yaml.safe_load((ROOT / "configs" / "cpu_smoke.yaml").read_text("utf-8"))
    for section, changes in _CONFIG.items():
        config[section] |= changes
    small = folder / f"{example.name}_config.yaml"
    small.write_text(yaml.safe_dump(config), "utf-8")
    document = yaml.safe_load(path.read_text("utf-8"))
    document |= {"config": str(small), "config_single": str(small)}
    document["workload"] = {"seq_len": _CONFIG["train"]["seq_len"], "source": _SOURCE}
    document["phases"] = _SMALL[example.name]
    path.write_text(yaml.safe_dump(document, sort_keys=False), "utf-8")


def typed(folder: Path) -> dict[str, Ended]:
    """Every line, typed into bash; the hang waits for its watchdog beside the others."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def begin(name: str) -> tuple[str, subprocess.Popen[str]]:
        make_smaller(RED[name], folder)
        line = rerun_line(DOCS / name / "report.md").replace(MADE_IN, str(folder))
        return line, subprocess.Popen(
            ["bash", "-c", line], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(PATH=programs, PYTHONPATH=str(ROOT)),
        )  # fmt: skip

    def end(line: str, process: subprocess.Popen[str]) -> Ended:
        out, err = process.communicate(timeout=400)
        executed.note(line, process.returncode)
        return Ended(code=process.returncode, out=out, err=err)

    waiting = begin("hang")
    ended = {name: end(*begin(name)) for name in RED if name != "hang"}
    return {**ended, "hang": end(*waiting)}


@pytest.mark.executes("runbook run --phase")
@pytest.mark.parametrize("name", RED)
def test_the_printed_command_ends_as_its_report_says(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    def make(folder: Path) -> tuple[Path, dict[str, Ended]]:
        return folder, typed(folder)

    folder, every = once(tmp_path_factory, "example_reruns", make)
    ended, told = every[name], DOCS / name / "report.md"
    assert ended.code == RED[name].exit_code, ended.out + ended.err
    assert ended.out.startswith(verdict_of(told))
    (report,) = (folder / name).glob("*/report.md")
    assert verdict_of(report) == verdict_of(told)
    record = RunRecord.model_validate_json(report.with_name("run.json").read_bytes())
    check, outcome = first_reason(told)
    assert {one.id: one.outcome for one in record.checks()}[check] == outcome
    # And it asks for the same again, on its page and where it was typed.
    assert asked(rerun_line(report)) == asked(rerun_line(told).replace(MADE_IN, str(folder)))
    assert rerun_line(report) in commands_in_output(ended.out)
    # At most 15 lines tell of one cause; below them stand what comes then, the fingerprint and the
    # two reports. A checkout that differs from its commit is a cause of its own, and no fault of
    # the example.
    others = [line for line in ended.out.splitlines() if "preflight.clean_tree:" in line]
    assert len(ended.out.splitlines()) <= 15 + 6 * len(others) + 4, ended.out
