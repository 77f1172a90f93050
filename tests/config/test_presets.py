"""Presets: every variable with its meaning and requirement, and one owner of what is launched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nsa.toggles import SAFE_MODE, TOGGLES, meaning
from runbook.cli import main
from runbook.config.extends import load_preset
from runbook.config.load import load_profile
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.files import preset_names

# What the production runbook makes mandatory and the cheatsheet bakes in, under today's names.
MANDATORY = {
    "NSA_PREFILL_BATCHED": "1", "NSA_SEL_RANGES_V2": "1", "NSA_DDP_COMPRESS": "bf16",
    "NSA_DDP_BUCKET_MB": "25", "NSA_DDP_STATIC_GRAPH": "1", "NSA_DDP_FIND_UNUSED": "0",
    "NSA_DDP_DISABLE_GC": "1", "NSA_DISABLE_AUX_STATS": "1",
    "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_IB_DISABLE": "1",
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:256,expandable_segments:True",
}  # fmt: skip
# The fast path of a layer, which gives way where it does not agree.
FAST = dict.fromkeys(("NSA_USE_TRITON_SEL", "NSA_COMPILE", "NSA_CUDA_GRAPHS"), "auto")
GIVEN = MANDATORY | FAST


def test_these_presets_are_shipped() -> None:
    assert preset_names() == ("production", "safe", "tuned", "unaccumulated", "validated")


@pytest.mark.parametrize("name", preset_names())
def test_every_variable_has_a_meaning_and_a_requirement(name: str) -> None:
    preset = load_preset(name)
    for variable, one in preset.env.items():
        assert preset.meaning(variable), variable
        wanted = "choice: " if one.value == "auto" else r"requirements? [A-Z]+\d"
        assert re.match(wanted, one.source), variable


def test_what_is_mandatory_is_in_the_preset_and_in_every_gpu_profile() -> None:
    assert load_preset("validated").variables == GIVEN
    for name in ("a100x2_pcie3", "a100x2_pcie4"):
        assert load_profile(name).variables == GIVEN
    pcie, several = {"NCCL_ALGO", "NCCL_PROTO"}, {"NCCL_IB_DISABLE"}
    for name in ("a100x2_nvlink", "h100x2_nvlink", "h200x2_nvlink"):
        left = GIVEN.keys() - pcie
        assert load_profile(name).variables == {key: GIVEN[key] for key in left}
    beside_graphs = {"NSA_DDP_STATIC_GRAPH", "PYTORCH_ALLOC_CONF"}  # not measured there
    for name in ("a100x1", "h100x1", "h200x1"):
        left = GIVEN.keys() - pcie - several - beside_graphs
        assert load_profile(name).variables == {key: GIVEN[key] for key in left}


def test_production_is_what_is_validated_with_the_board_on_and_the_csv_off() -> None:
    more = {"NSA_TB_DISABLE": "0", "NSA_DISABLE_CSV_LOGS": "1"}
    assert load_preset("production").variables == GIVEN | more
    tuned = load_preset("tuned")
    assert tuned.variables == GIVEN
    assert tuned.config == "m7c_125m_2xa100_production_tuned.yaml"


@pytest.mark.parametrize(("name", "batch"), [("tuned", 4), ("unaccumulated", 2)])
def test_a_preset_with_another_config_is_held_to_its_own_workload(
    name: str, batch: int, tmp_path: Path
) -> None:
    """Requirements C4 and C9: the gate of a launch knows the work; a run's GO is not about it."""
    words = {"profile": "a100x2_pcie4", "preset": name, "out": str(tmp_path)}
    launch = prepare(RunOptions(**words, plan="production", until="smoke"))
    work = launch.profile.workload
    assert (work.seq_len, work.global_batch, work.accumulation) == (2048, batch, 1)
    trained = {one.config for one in launch.planned if one.phase in ("sanity", "smoke")}
    assert trained == {f"configs/{load_preset(name).config}"}
    run = prepare(RunOptions(**words, phases="baseline"))
    assert run.profile.workload == load_profile("a100x2_pcie4").workload


def test_the_safe_preset_spells_out_what_the_safe_mode_means() -> None:
    variables = load_preset("safe").variables
    assert {name: meaning(name, variables) for name in SAFE_MODE} == SAFE_MODE
    assert set(variables) == {"NSA_DDP_SAFE_MODE", *SAFE_MODE}


def test_a_preset_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"no preset 'prod'.*there are: production, safe"):
        load_preset("prod")


def test_it_is_shown_with_lines_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toggles", "--preset", "production"]) == 0
    shown = capsys.readouterr().out
    for name, value in MANDATORY.items():
        assert f"export {name}={value}" in shown
        assert name not in TOGGLES or TOGGLES[name].meaning in shown
    assert "NSA_USE_FA2" in shown and "torch's SDPA" in shown
    assert main(["toggles", "--preset", "tuned"]) == 0
    assert "export CONFIG=configs/m7c_125m_2xa100_production_tuned.yaml" in capsys.readouterr().out
    assert main(["toggles", "--preset", "fast"]) == 2
