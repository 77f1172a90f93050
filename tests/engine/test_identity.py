"""What makes another machine or another stack of software, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nsa.contract import installed_digest
from runbook.errors import UsageError
from runbook.machine.identity import code_digest, identity, package_folders, refuse_if_unlike
from runbook.records import RunRecord, Verdict
from tests.factory.programs import program
from tests.reports.samples import run as sample_run

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


def made(folder: Path, name: str, version: str, *requires: str) -> None:
    """A package as installers leave it, which comes before the real one of that name."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Requires-Dist: {one}\n" for one in requires]
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text("".join([text, *lines]))


def test_a_package_that_torch_computes_with_counts_and_a_profiler_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ("nvidia-nccl-cu13 (>=2) ; platform_system == 'Linux'", "opt ; extra == 'x'")
    found = []
    for number, packages in enumerate(
        [
            [("torch", "9.9", *needed)],
            [("torch", "9.9", *needed), ("nvidia-nccl-cu13", "2.1")],
            [("torch", "9.9", *needed), ("nvidia-nccl-cu13", "2.2")],
            [("torch", "9.9", *needed), ("nvidia-nccl-cu13", "2.2"), ("opt", "1"), ("spy", "1")],
            [("torch", "9.9+cpu", *needed), ("nvidia-nccl-cu13", "2.2")],
        ]
    ):
        with monkeypatch.context() as here:
            for one in packages:
                made(tmp_path / str(number), *one)
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
