"""Presets: every variable with its meaning and requirement, and one owner of what is launched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from nsa import contract
from nsa.toggles import TOGGLES
from runbook.cli import main
from runbook.config.extends import load_preset, preset_names
from runbook.config.load import load_profile, profile_names
from runbook.config.plan import load_plan, with_plan
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.files import data_path, shipped_names
from scripts import contract_tables
from scripts.thresholds_page import thresholds_page
from tests.config import cases

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


@pytest.mark.parametrize("name", preset_names())
def test_every_variable_has_a_meaning_and_a_requirement(name: str) -> None:
    preset = load_preset(name)
    for variable, one in preset.env.items():
        assert preset.meaning(variable), variable
        wanted = "choice: " if one.value == "auto" else r"requirements? [A-Z]+\d"
        assert re.match(wanted, one.source), variable


def test_what_is_mandatory_is_in_the_preset_and_in_every_gpu_profile() -> None:
    assert load_preset("validated").variables == GIVEN == load_preset("tuned").variables
    more = {"NSA_TB_DISABLE": "0", "NSA_DISABLE_CSV_LOGS": "1"}
    assert load_preset("production").variables == GIVEN | more
    assert load_preset("tuned").config == "m7c_125m_2xa100_production_tuned.yaml"
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


def test_it_is_shown_with_lines_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toggles", "--preset", "production"]) == 0
    shown = capsys.readouterr().out
    for name, value in MANDATORY.items():
        assert f"export {name}={value}" in shown
        assert name not in TOGGLES or TOGGLES[name].meaning in shown
    assert "NSA_USE_FA2" in shown and "torch's SDPA" in shown
    assert main(["toggles", "--preset", "fast"]) == 2


# Plans: what a file says is what runs, and what is wrong with one is told at once.

CPU = load_profile("cpu")


def planned(path: Path | str) -> tuple[str, ...]:
    """The phases of a plan on a CPU."""
    made = with_plan(CPU, load_plan(str(path), has_gpu=False), shipped=False)
    return made.plan.phases


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("plan", shipped_names(data_path("configs") / "plans"))
@pytest.mark.parametrize("profile", profile_names())
def test_shipped_plans_fit_shipped_profiles(profile: str, plan: str) -> None:
    machine = load_profile(profile)
    made = with_plan(machine, load_plan(plan, has_gpu=machine.has_gpu), shipped=True)
    asked = {check.partition(".")[0] for check in made.required}
    assert asked == set(made.plan.phases), "each phase has a gate"


def test_production_is_the_documents_steps() -> None:
    plan = load_plan("production")
    steps = {name: one.steps for name, one in plan.phases.items() if one.kind}
    assert steps == {"sanity": 1, "smoke": 300, "extended": 1000, "production": 50_000}
    assert plan.stops and plan.phases["production"].needs_go
    assert plan.phases["production"].steps // plan.phases["production"].legs == 5000


def test_a_plan_of_ones_own_says_only_what_differs(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "extends: production\nname: mine\n"
        "phases: {preflight: null, smoke: {steps: 40}, production: null}\n",
    )
    assert planned(path) == ("sanity", "smoke", "extended")
    assert load_plan(str(path)).phases["smoke"].steps == 40


WARM = {"kind": "training", "title": "t", "steps": 4, "timeout_s": 60, "checks": ["completed"]}


# What differs of its phase `warm`, or of the plan -> what the error has.
@pytest.mark.parametrize("case", cases("refused_plans"))
def test_a_bad_plan_is_refused_with_what_is_allowed(tmp_path: Path, case: str) -> None:
    change, told = case.split(" -> ")
    changed = yaml.safe_load(change)
    whole, name, behind = (changed.pop(key, {}) for key in ("plan", "name", "behind"))
    phase = {key: one for key, one in (WARM | {"source": "s"} | changed).items() if one}
    plan = {"schema_version": 1, "name": "mine", "title": "mine", "stops": True}
    plan |= {"phases": {name or "warm": phase, **behind}} | whole
    with pytest.raises(UsageError) as error:
        planned(written(tmp_path, yaml.safe_dump(plan, sort_keys=False)))
    assert told in str(error.value)


def test_production_is_gated_by_a_phase_that_trains_the_same(tmp_path: Path) -> None:
    text = "extends: production\nname: mine\nphases:\n  extended: null\n"
    text += "  smoke: {config_overrides: {data.tokenizer: gpt2}}\n"
    with pytest.raises(UsageError, match=r"production\.dataset: no phase before it trains on fine"):
        planned(written(tmp_path, text))


# The pages made from code: thresholds, and the tables of the contract.

PAGE = Path(__file__).parents[2] / "docs" / "thresholds.md"


def test_the_page_of_thresholds_is_what_its_script_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == thresholds_page()


def test_the_contracts_page_has_the_tables_that_its_script_makes() -> None:
    page = contract_tables.PAGE.read_text("utf-8")
    assert contract_tables.with_tables(page) == page
    for columns in (contract.TRAINING_COLUMNS, contract.VAL_COLUMNS, contract.GATES_COLUMNS):
        for column in columns:
            unit = f" ({column.unit})" if column.unit else ""
            assert f"\n| `{column.name}` | {column.meaning}{unit} |" in page, column.name
    for code in contract.ExitCode:
        assert f"\n| {int(code)} | {code.meaning} |" in page
