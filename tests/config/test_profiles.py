"""Profiles: the demanded numbers are in them, each with its source, and every mistake is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from runbook.config import registry
from runbook.config.load import is_shipped, load_profile, profile_names
from runbook.config.registry import known_checks
from runbook.errors import UsageError
from runbook.files import data_path
from tests.config import cases

PHASES = registry.phases()

# What is demanded of two A100, by requirement of docs/spec.md.
LIMITS = registry.known_limits(registry.phases())

DEMANDED = {
    "throughput": (">=", 39.0, "B3"),
    "throughput_aim_low": (">=", 45.0, "B4"),
    "throughput_aim_high": ("<=", 55.0, "B4"),
    "gpu_utilisation": (">", 80.0, "B9"),
    "memory_headroom": (">", 20.0, "B11"),
    "memory_gib": ("<", 60.0, "L7"),
}


MACHINES = [name for name in profile_names() if name != "cpu"]


def test_these_machines_have_a_profile() -> None:
    """The documents' pairs, every card alone, and one to eight of each."""
    pairs = {"a100x2_pcie3", "a100x2_pcie4", "a100x2_nvlink", "h100x2_nvlink", "h200x2_nvlink"}
    alone = {"a100x1", "a100_40gbx1", "h100x1", "h100_pciex1", "h100_nvlx1", "h200x1", "b200x1"}
    assert pairs | alone | {"cpu"} < set(profile_names())
    for name in ("a100x4_pcie4", "h100x8_nvlink", "b200x8_nvlink", "h100_pciex3_pcie5"):
        assert is_shipped(name) and load_profile(name).ranks == int(name.split("x")[1][0])
    for name in ("h100x9_nvlink", "h100x2_pcie5", "h100x1_nvlink", "h100x0", "h100", "v100x1"):
        assert not is_shipped(name)


@pytest.mark.parametrize("name", MACHINES)
def test_beside_a_toy_floor_stands_a_physical_one_that_decides(name: str) -> None:
    """39 tok/s are 0.005 % of an A100; the second floor is a share of the device's own peak."""
    profile = load_profile(name)
    floor, peak = profile.limits["mfu_floor"], profile.hardware.peak_tflops
    assert peak and profile.hardware.peak_source
    assert floor.gated and floor.value * peak >= 15 and "baseline.mfu" in profile.required
    toy = profile.limits["throughput"].value * 5e8 / (peak * 1e12)
    assert toy < floor.value / 100


@pytest.mark.parametrize("name", MACHINES)
def test_the_floors_of_the_card_part_a_healthy_one_from_a_sick_one(name: str) -> None:
    """A healthy card reaches 70 % of what is possible at least, half a one at most 85 % of half."""
    profile = load_profile(name)
    peaks = profile.hardware.peaks
    for limit, what in (
        ("ceiling_matmul_tflops", "matmul"),
        ("ceiling_memory_gb_s", "memory_copy"),
        ("ceiling_host_gb_s", "host_copy"),
    ):
        floor, most = profile.limits[limit].value, peaks[what].value
        assert floor < (0.7 if limit != "ceiling_memory_gb_s" else 0.8) * most
        if limit == "ceiling_host_gb_s" and profile.hardware.pcie_gen is None:
            continue  # which link the host has is not asked
        assert floor > 0.85 * most / 2, limit
    assert profile.limits["memory_gib"].value < profile.hardware.gpu_memory_gib


@pytest.mark.parametrize("limit", DEMANDED)
def test_the_demanded_limits_stand_as_written(limit: str) -> None:
    found = load_profile("a100x2_pcie4").limit(LIMITS[limit])
    comparator, value, requirement = DEMANDED[limit]
    assert (found.spec.comparator.value, found.value) == (comparator, value)
    assert re.search(rf"requirements? (\w+ and )?{requirement}\b", found.source)


TIMING = {
    "baseline.throughput", "baseline.mfu", "bucket_sweep.best", "v2_parity.faster",
    "nvtx.python_share", "nvtx.python_hotspot", "single_gpu.scaling", "long_run.steady",
}  # fmt: skip


def test_cpu_requires_no_timing_and_one_gpu_no_scaling() -> None:
    cpu, h200, a100 = (load_profile(name) for name in ("cpu", "h200x1", "a100x2_pcie4"))
    assert not cpu.throughput_gated and not TIMING & set(cpu.required)
    assert TIMING - set(h200.required) == {"single_gpu.scaling"}
    assert set(a100.required) >= TIMING


@pytest.mark.parametrize("name", profile_names())
def test_each_phase_has_a_required_row_that_says_it_ran(name: str) -> None:
    profile = load_profile(name)
    required, known = set(profile.required), set(known_checks(profile))
    for phase in PHASES.values():
        assert any(check.startswith(f"{phase.name}.") for check in required) != phase.optional
        assert phase.optional or {f"{phase.name}.completed"} & known <= required


@pytest.mark.parametrize("name", profile_names())
def test_the_workload_is_that_of_the_trainers_config(name: str) -> None:
    profile = load_profile(name)
    assert (data_path("configs") / profile.config_single).is_file()
    config = yaml.safe_load((data_path("configs") / profile.config).read_text())
    work, train = profile.workload, config["train"]
    assert (work.seq_len, work.global_batch) == (train["seq_len"], train["batch_size"])
    assert work.accumulation == train["accumulate_grad_batches"]
    assert work.dtype == config["runtime"]["precision"]


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_limit_whose_declaration_is_nulled_keeps_it(tmp_path: Path) -> None:
    """Null means: leave the key out. What is declared in code stays in force, with every row."""
    text = "extends: cpu\nname: mine\nlimits: {disk_free_gib: {comparator: null, unit: null}}\n"
    mine, shipped = load_profile(written(tmp_path, text)), load_profile("cpu")
    assert mine.limit(LIMITS["disk_free_gib"]) == shipped.limit(LIMITS["disk_free_gib"])
    assert known_checks(mine) == known_checks(shipped)


# What a file has below `extends: cpu` -> what the error has; a `|` begins a new line.
@pytest.mark.parametrize("case", cases("refused_profiles"))
def test_a_broken_profile_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    text, told = case.split(" -> ")
    below = "" if text.startswith(("name", "- ", "extends")) else "extends: cpu\n"
    with pytest.raises(UsageError, match=re.escape(told)):
        load_profile(written(tmp_path, below + text.replace("|", "\n") + "\n"))


def test_profiles_must_not_extend_each_other_in_a_circle(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile(str(path))
    path.write_text(f"extends: {path}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="circle"):
        load_profile(str(path))


@pytest.mark.parametrize("case", cases("meant_profiles"))
def test_what_may_be_meant_has_never_fewer_gpus_than_were_typed(case: str) -> None:
    typed, meant = case.split(" -> ")
    with pytest.raises(UsageError) as caught:
        load_profile(typed)
    near, none = f" (did you mean {meant}?); all: `runbook profiles`", "; there are: a100_40gbx1, "
    assert f"no profile {typed!r}{none if meant == 'nothing' else near}" in str(caught.value)
    assert meant != "nothing" or "needs a path ending in .yaml" in str(caught.value)


def test_the_cpu_profile_trains_with_three_micro_batches_in_a_required_phase() -> None:
    """The first, the last, and one between them, which two would not have."""
    profile = load_profile("cpu")
    assert profile.phases["nvtx"].env["NSA_ACCUM"].value == "3"
    assert {"nvtx.gradients", "nvtx.accounts"} <= set(profile.required)
