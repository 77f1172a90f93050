"""Code that gets in before ours: whose packages are imported."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.contract.digests import installed_digest
from runbook.errors import UsageError
from runbook.machine import git
from runbook.machine.gpu import visible_gpus
from runbook.machine.gpu.cards import parse_nvidia_smi, parse_topology
from runbook.machine.identity import (
    code_digest,
    identity,
    package_folders,
    refuse_if_unlike,
)
from runbook.machine.preflight import _git_drafts, gpu_drafts
from runbook.records import RunRecord, Verdict
from tests.factory import programs
from tests.factory.programs import program
from tests.factory.tables import rows, table
from tests.machine.test_detect import FIXTURES
from tests.reports.samples import run as sample_run

HERE = Path(__file__).resolve().parents[2]


def test_a_clean_checkout_that_is_not_what_runs_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH, or another environment's `runbook` in the folder of this checkout."""
    (tmp_path / "nsa").mkdir()
    (tmp_path / "nsa" / "__init__.py").write_text("")
    programs.git(tmp_path, "init", "-q", "-b", "main")
    programs.git(tmp_path, "add", ".")
    programs.git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(git, "find_checkout", lambda: tmp_path)
    (out := tmp_path.with_suffix(".run")).mkdir()
    drafts = {draft.name: draft for draft in _git_drafts(out, None)}
    assert drafts["git.dirty"].value is True
    assert f"nsa is imported from {HERE / 'nsa'}, not from " in drafts["git.dirty"].note
    (tmp_path / "new.py").write_text("")
    drafts = {draft.name: draft for draft in _git_drafts(out, None)}
    assert drafts["git.dirty"].note.endswith("; ?? new.py")
    assert "nsa is imported from" in (out / "git_status.txt").read_text()


SMI = parse_nvidia_smi((FIXTURES / "a100x2_pcie4.xml").read_text(encoding="utf-8"))
UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444")
FOUR = tuple(
    replace(SMI.gpus[0], index=index, uuid=uuid, mig=index == 3) for index, uuid in enumerate(UUIDS)
)


@table(__file__, "visible_devices")
def test_the_variable_means_what_cuda_takes_it_for(text: str | None, indices: str) -> None:
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    found = visible_gpus(FOUR, environment=environment)
    assert "".join(str(gpu.index) for gpu in found) == indices


def test_a_link_counts_between_visible_gpus_only() -> None:
    links = parse_topology((FIXTURES / "topo_nvlink.txt").read_text(encoding="utf-8"))
    three = replace(SMI, gpus=FOUR[:3])
    for pair, nvlink in (((0, 1), True), ((0, 2), False)):
        visible = [FOUR[index] for index in pair]
        drafts = {draft.name: draft for draft in gpu_drafts(three, links, visible=visible)}
        assert drafts["gpu.nvlink"].value is nvlink


FIRST, SECOND = (f"<gpu><uuid>GPU-{one}</uuid></gpu>" for one in ("aaaa-1111", "bbbb-2222"))
DRIVER = "<driver_version>580.95.05</driver_version>"
CARDS = f"<nvidia_smi_log>{DRIVER}{FIRST}{SECOND}</nvidia_smi_log>"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that prints what lies in the file that is returned."""
    listing = tmp_path / "listing"
    program(tmp_path / "nvidia-smi", f"exec cat {listing}")
    listing.write_text(CARDS)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return listing


def record(environment: dict[str, str]) -> RunRecord:
    return sample_run(Verdict.GO, ()).model_copy(update={"environment": environment})


def test_another_card_of_the_same_kind_is_another_machine(smi: Path) -> None:
    then = identity()
    assert "aaaa" not in str(then), "a digest, no UUID"
    smi.write_text(CARDS.replace("bbbb", "cccc"))
    with pytest.raises(UsageError, match=r"GPUs \(digest\): \w{12} then, \w{12} now"):
        refuse_if_unlike(record(then), identity())


def test_other_visible_cards_are_refused(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for visible in ("0", "1", "MIG-1", "MIG-2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(identity()["gpus"])
    assert len(set(found)) == 4


def test_a_driver_that_does_not_answer_is_not_the_same_as_no_gpu(smi: Path) -> None:
    then = identity()
    for text in ("", "No devices were found\n", "<nvidia_smi_log/>"):
        smi.write_text(text)
        assert identity()["gpus"] not in (then["gpus"], "none")
        with pytest.raises(UsageError, match="nvidia-smi does not say now"):
            refuse_if_unlike(record(then), identity())


NEEDS = """Requires-Dist: nvidia-nccl-cu13 (>=2) ; platform_system == 'Linux'
Requires-Dist: opt ; extra == 'x'
"""


def made(folder: Path, name: str, version: str) -> Path:
    """A package as installers leave it, which comes before the real one of that name."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text + NEEDS * (name == "torch"))
    return info


def test_a_package_that_torch_computes_with_counts_and_a_profiler_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number, row in enumerate(rows(__file__, "installed")):
        with monkeypatch.context() as here:
            for name, version in row["packages"].items():
                made(tmp_path / str(number), name, version)
            here.syspath_prepend(tmp_path / str(number))
            found.append(installed_digest())
    assert len(set(found)) == 4
    assert found[2] == found[3]
    assert identity()["packages"] == installed_digest()[:12]


@pytest.mark.parametrize("name", ["kit/playbook.yaml", "kit/rows.py"])
def test_rules_and_remedies_are_code_wherever_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    copied = Path(shutil.copytree(package_folders()["phases"], tmp_path / "phases"))
    folders = {**package_folders(), "phases": copied}
    monkeypatch.setattr("runbook.machine.identity.package_folders", lambda: folders)
    assert (before := code_digest()) == code_digest()
    (copied / name).write_text((copied / name).read_text() + "\n# another\n")
    assert code_digest() != before
