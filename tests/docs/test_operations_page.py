"""Every command on the operator's page is one that this program has, with toggles that it knows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import runbook as package
from nsa.contract import NSAError
from nsa.launch.plan import plan_launch
from nsa.toggles import TOGGLES
from runbook.cli import main
from runbook.config.extends import load_preset
from runbook.config.load import load_profile
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.records import ArmSchedule
from tests.docs.test_documents import BLOCKS
from tests.docs.test_spec import ROOT

PAGE = Path(package.__file__).resolve().parent.parent / "docs" / "operations.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROGRAMS = ("runbook", "make", "bash", "python", "torchrun", "tail", "touch", "kill", "watch", "cd")
NO_ARMS = ArmSchedule(settings={}, rounds=(), steps=1, warmup_steps=0)


def commands(text: str) -> list[str]:
    """Every command of a page: the lines of its blocks for a shell, and those within sentences."""
    found, shell, fenced = [], [], False
    prose = []
    for line in text.splitlines():
        if line.strip().startswith("```"):
            fenced = not fenced
            yaml_follows = fenced and line.strip() != "```"
        elif fenced and not yaml_follows:
            shell.append(line.strip())
        elif not fenced:
            # Of a table the first column has what was typed elsewhere, or what the line is for.
            prose.append(re.sub(r"^\|[^|]*\|", "", line))
    joined = re.sub(r"\\\n\s*", "", "\n".join(shell))
    found += [re.sub(r"\s{2,}#.*$", "", line).strip() for line in joined.splitlines()]
    found += re.findall(r"`([^`\n]+)`", "\n".join(prose))
    # `export ...` speaks of lines, and is none.
    whole = [line for line in found if line and "..." not in line]
    return sorted({line for line in whole if program_of(line) in (*PROGRAMS, "export")})


def program_of(line: str) -> str:
    """The program that a line starts, behind the variables that it sets."""
    words = (word for word in line.split() if not re.match(r"[A-Z_0-9]+=", word))
    return next(words, "")


LINES = commands(TEXT)
BLOCK = [word for line in LINES if line.startswith("export") for word in shlex.split(line)[1:]]
DOCUMENTED = dict(word.split("=", 1) for word in BLOCK)
BY_HAND = [line for line in LINES if " -m nsa.train " in line]
SIGNAL = [line for line in LINES if line.startswith(("cd ", "kill "))]
SAMPLED = [line for line in LINES if line.startswith("watch ")]
FOLLOWED = [line for line in LINES if line.startswith("tail ")]
PLANNED = [line for line in LINES if "runbook run" in line and "--resume RUN" not in line]


@pytest.mark.parametrize("line", PLANNED)
def test_the_line_is_accepted(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planned to the last command; what it starts is started by `tests/cli` and `tests/phases`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (own,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "our_a100s.yaml").write_text(textwrap.dedent(own))
    variables, _, rest = line.partition("runbook run")
    for word in variables.split():
        monkeypatch.setenv(*word.split("=", 1))
    words = ["run", *shlex.split(rest)]
    words = [str(Path(word).expanduser()) for word in words if word != "--dry-run"]
    profile = [] if "--profile" in words else ["--profile", "a100x2_pcie4"]
    assert main([*words, "--dry-run", *profile]) == 0
    assert capsys.readouterr().err == ""


def test_every_toggle_on_the_page_exists() -> None:
    named = set(re.findall(r"\bNSA_[A-Z0-9_]+\b", TEXT))
    assert named <= set(TOGGLES)
    assert len(named) > 10


def test_what_is_launched_by_hand_the_trainer_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the trainer checks before it loads torch, of both blocks."""
    monkeypatch.chdir(ROOT)
    two, one = sorted(BY_HAND, key=lambda line: "--ddp 0" in line)
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    plan = plan_launch(shlex.split(two.partition(" -m nsa.train ")[2]), DOCUMENTED | ranks)
    assert plan.ddp and plan.config.train.steps == 50_000 and plan.flags.save
    words = shlex.split(one)
    typed = dict(word.split("=", 1) for word in words[: words.index("python")])
    alone = plan_launch(words[words.index("nsa.train") + 1 :], typed)
    assert not alone.ddp and alone.config.data.dataset == "fineweb_edu"
    with pytest.raises(NSAError, match="no such toggle"):
        plan_launch([], {**DOCUMENTED, "NSA_DDP_BUKET_MB": "25"})


def test_a_signal_by_hand_reaches_the_rank_and_nobody_else(tmp_path: Path) -> None:
    """The two lines of the page in a shell, with a process in the place of rank 0."""
    # Blocked before it says so: a handler would be missed by a pause that begins after it.
    waits = "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); "
    waits += (
        "print('up', flush=True); signal.alarm(60); signal.sigwait({signal.SIGUSR1}); sys.exit(7)"
    )
    rank = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE)
    with rank:
        assert rank.stdout is not None and rank.stdout.readline()
        folder = tmp_path / "artifacts/m7c_125m_2xa100_prod/latest"
        folder.mkdir(parents=True)
        (folder / "heartbeat_rank0.jsonl").write_text(f'{{"pid": {rank.pid}}}\n{{"pid": 0}}\n')
        line = "\n".join(SIGNAL).replace("python", shlex.quote(sys.executable))
        subprocess.run(["bash", "-ec", line], cwd=tmp_path, check=True, timeout=30)
        assert rank.wait(timeout=30) == 7


def test_nvidia_smi_knows_what_is_asked_for() -> None:
    """By the list of columns that a real driver printed."""
    (asked,) = re.findall(r"--query-gpu=(\S+)", SAMPLED[0])
    (known,) = ROOT.glob("tests/real/*/query_help.txt")
    assert {f'"{name}"' for name in asked.split(",")} <= set(known.read_text().split())


def test_what_is_followed_is_what_the_documents_follow() -> None:
    """The same files as the blocks `follow` and `follow_heartbeats` of documents.yaml."""
    typed = {one["typed"].removeprefix("timeout 1 ") for one in BLOCKS.values()}
    assert {line.partition("  #")[0].strip() for line in FOLLOWED} <= typed


def test_what_is_measured_is_what_is_launched() -> None:
    """The documented launch, the preset, the profile, and what a GO of it exports are one."""
    profile = load_profile("a100x2_pcie4")
    assert DOCUMENTED == profile.variables == load_preset("validated").variables
    setup = prepare(RunOptions(profile="a100x2_pcie4"))
    assert setup.exports == DOCUMENTED
    launched = {launch.config for launch in setup.planned if launch.kind == "trainer"}
    assert launched == set(re.findall(r"torchrun .*--config (\S+)", TEXT))
    trained = [one for one in setup.planned if one.argv[0] == "torchrun" and one.kind == "trainer"]
    for launch in trained:
        own = {name for arm in (launch.schedule or NO_ARMS).settings.values() for name in arm}
        kept = {name: value for name, value in DOCUMENTED.items() if name not in own}
        assert kept.items() <= launch.env.items(), launch.name


def test_every_phase_of_a_launch_has_the_documented_environment() -> None:
    """Requirement D4, and what is measured is what is launched, to the last leg."""
    setup = prepare(RunOptions(profile="a100x2_pcie4", plan="production", without_go=True))
    by_phase = {name: one for name, one in setup.profile.phases.items() if one.stage}
    trained = [one for one in setup.planned if one.phase in by_phase]
    assert {one.phase for one in trained} == {"sanity", "smoke", "extended", "production"}
    for launch in trained:
        own = set(by_phase[launch.phase].env)
        assert own <= {"NSA_TB_DISABLE", "NSA_DISABLE_AUX_STATS", "NSA_DISABLE_CSV_LOGS"}
        kept = {name: value for name, value in DOCUMENTED.items() if name not in own}
        assert kept.items() <= launch.env.items(), launch.name
    smoke = next(one for one in trained if one.phase == "smoke")
    assert smoke.steps == 300 and smoke.argv[smoke.argv.index("--dataset") + 1] == "fineweb_edu"
    judged = {"smoke.throughput", "smoke.gpu_utilisation", "smoke.steady"}
    assert judged <= set(setup.profile.required)
