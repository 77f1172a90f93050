"""Machines of one to eight cards: each has its profile, and can have the whole of a run."""

from __future__ import annotations

import pytest

from runbook.cli import main
from runbook.config.machines import machines
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare

# By card, what links several: nothing but the list of machines that have to be there.
LINKS = {
    "a100": ("nvlink", "pcie3", "pcie4"),
    "a100_40gb": ("nvlink", "pcie3", "pcie4"),
    "h100": ("nvlink",),
    "h100_pcie": ("nvlink", "pcie4", "pcie5"),
    "h100_nvl": ("nvlink", "pcie4", "pcie5"),
    "h200": ("nvlink",),
    "b200": ("nvlink",),
}
FAST = ("NSA_USE_TRITON_SEL", "NSA_COMPILE", "NSA_CUDA_GRAPHS")


def test_every_number_of_every_card_has_a_profile() -> None:
    wanted = {f"{card}x1" for card in LINKS} | {
        f"{card}x{number}_{link}"
        for card, links in LINKS.items()
        for number in range(2, 9)
        for link in links
    }
    assert set(machines()) == wanted


@pytest.mark.parametrize("card", LINKS)
def test_all_its_phases_can_be_planned_on_the_fast_path(card: str) -> None:
    """The batch divides by the ranks of each launch."""
    for name in (name for name in machines() if name.rpartition("x")[0] == card):
        setup = prepare(RunOptions(profile=name))
        training = [launch for launch in setup.planned if launch.kind == "trainer"]
        assert len({launch.phase for launch in training}) >= 6, name
        for launch in training:
            by_config = launch.config_overrides.get("train.batch_size", 2)
            batch = int(launch.env.get("NSA_BATCH_SIZE", str(by_config)))
            assert batch % launch.nproc == 0, (name, launch.run_dir)
            found = [launch.env.get(toggle) for toggle in FAST]
            assert found == ["auto"] * 3, (name, launch.run_dir)


def test_a_batch_for_each_card_is_said_where_the_documents_have_two() -> None:
    """Two cards have the documents' batch; with more the profile changes it, visibly."""
    assert "NSA_BATCH_SIZE" not in prepare(RunOptions(profile="h200x2_nvlink")).profile.env
    changed = prepare(RunOptions(profile="h200x8_nvlink")).profile
    assert changed.env["NSA_BATCH_SIZE"].value == "8" == str(changed.workload.global_batch)
    assert changed.env["NSA_BATCH_SIZE"].source.endswith("of 8 GPUs")


@pytest.mark.parametrize("name", ["a100x1", "a100x2_pcie4", "h100_pciex4_pcie5", "h200x8_nvlink"])
def test_a_dry_run_shows_the_fast_path(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run asks for no GPU."""
    assert main(["run", "--profile", name, "--phase", "baseline", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert all(f"{toggle}=auto" in told for toggle in FAST)
