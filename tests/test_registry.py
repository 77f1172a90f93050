"""Phases and reports come from entry points, also those of a second installed package."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

import runbook as package
from runbook.config import registry
from tests.cli.shell import Ended, runbook

HOME = Path(package.__file__).resolve().parent.parent
OF_A_RUN = [name for name, phase in registry.phases().items() if not phase.optional]

PHASE = """\
    from runbook.config.registry import Judgement, Phase


    class Warp(Phase):
        name = "warp"
        order = 35
        title = "Warp"
        source = "the neighbors"
        question = "Does it come from another package?"

        def plan(self, context):
            return []

        def judge(self, evidence, context):
            return Judgement(checks=())

        def check_ids(self, context):
            return ()
"""


def install(folder: Path, *, name: str, entry: str) -> Path:
    """A folder in which a package with one phase is installed, as pip leaves it there."""
    module, info = name.replace("-", "_"), folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(textwrap.dedent(PHASE))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[runbook.phases]\n{entry} = {module}:Warp\n")
    return folder


def start(*words: str, path: str = "") -> Ended:
    return runbook(*words, cwd=HOME, PYTHONPATH=path)


@pytest.fixture(scope="module")
def warp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed package with one phase, for reading only."""
    return install(tmp_path_factory.mktemp("warp"), name="warp-phases", entry="warp")


def test_a_phase_of_another_package_is_listed_in_its_place(warp: Path) -> None:
    listed = start("phases", path=str(warp))
    assert listed.code == 0, listed.err
    names = [line.split()[0] for line in listed.out.splitlines()[1:]]
    assert " bucket_sweep warp sdpa_audit " in " ".join(names)
    assert [name for name in names if name != "warp"] == list(registry.phases())
    planned = start("run", "--profile", "cpu", "--dry-run", "--json", path=str(warp))
    ran = [phase["name"] for phase in json.loads(planned.out)["phases"]]
    assert ran == OF_A_RUN, "installing a package changes no verdict"


def test_a_phase_of_another_package_runs_when_it_is_named(warp: Path, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: cpu\nname: mine\nphases: {warp: {timeout_s: 60, source: x}}\n")
    words = ("run", "--phase", "warp", "--profile", str(profile), "--dry-run", "--json")
    planned = start(*words, path=str(warp))
    assert planned.code == 0, planned.err
    assert [phase["name"] for phase in json.loads(planned.out)["phases"]] == ["warp"]
    refused = start("run", "--phase", "warp", "--profile", "cpu", "--dry-run", path=str(warp))
    assert refused.code == 2
    assert "profile cpu says nothing of phase warp" in refused.err


def test_two_packages_with_one_phase_are_refused(tmp_path: Path) -> None:
    ours = install(tmp_path, name="second-nvtx", entry="nvtx")
    refused = start("phases", path=str(ours))
    assert refused.code == 2
    assert "runbook.phases 'nvtx' is installed twice" in refused.err
    assert "second-nvtx (second_nvtx:Warp)" in refused.err
    assert "nsa-runbook (phases.nvtx:Nvtx)" in refused.err


@pytest.mark.parametrize("text", ["", "import nowhere_at_all\n"])
def test_a_package_whose_phase_is_not_there_is_named(tmp_path: Path, text: str) -> None:
    folder = install(tmp_path, name="broken-phases", entry="broken")
    (folder / "broken_phases.py").write_text(text)
    refused = start("phases", path=str(folder))
    assert refused.code == 2
    whose = "runbook.phases 'broken' of broken-phases (broken_phases:Warp) cannot be loaded: "
    assert whose in refused.err and "; correct or uninstall it" in refused.err


@pytest.mark.parametrize(
    ("package", "words"), [("phases", ("phases",)), ("reports", ("report",)), ("nsa", ("toggles",))]
)
def test_a_folder_that_hides_a_package_of_ours_is_refused_and_not_run(
    package: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemExit('foreign code ran')\n")
    refused = start(*words, path=str(tmp_path))
    assert refused.code == 2
    assert f"{tmp_path}/{package} hides this program's {package}: rename it" in refused.err
    assert "foreign code ran" not in refused.err


def test_selection_keeps_the_running_order() -> None:
    def selected(asked: str) -> list[str]:
        return [phase.name for phase in registry.select(asked)]

    assert selected("long_run, baseline") == ["baseline", "long_run"]
    assert selected("fineweb") == ["fineweb"] and selected("all") == OF_A_RUN
    assert selected("regression,fineweb,all") == list(registry.phases())
