"""Profiles, presets and plans: each demanded number with its source; every mistake is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from nsa import contract
from nsa.toggles import TOGGLES
from runbook.cli import main
from runbook.config import registry
from runbook.config.extends import load_preset, preset_names
from runbook.config.load import is_shipped, load_profile, profile_names
from runbook.config.plan import load_plan, with_plan
from runbook.config.registry import known_checks
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.files import data_path, shipped_names
from scripts import contract_tables
from scripts.thresholds_page import thresholds_page
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
    assert profile.phases["sdpa_audit"].env["NSA_ACCUM"].value == "3"
    assert {"sdpa_audit.gradients", "sdpa_audit.accounts"} <= set(profile.required)


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


def test_it_is_shown_with_lines_to_paste(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that this machine refuses is not among what is to be typed."""
    monkeypatch.setattr("runbook.machine.gpu.detect_profile", lambda: ("cpu", "as planned"))
    assert main(["toggles", "--preset", "production"]) == 0
    shown = capsys.readouterr().out
    assert "\ntyped as runbook launch --preset production\nnot on this machine: runbook" in shown
    for name, value in MANDATORY.items():
        assert f"export {name}={value}" in shown
        assert name not in TOGGLES or TOGGLES[name].meaning in shown
    assert "NSA_USE_FA2" in shown and "torch's SDPA" in shown
    assert main(["toggles", "--preset", "fast"]) == 2


# Plans: what a file says is what runs, and what is wrong with one is told at once.

CPU = load_profile("cpu")


def planned(path: str) -> tuple[str, ...]:
    """The phases of a plan on a CPU."""
    made = with_plan(CPU, load_plan(path, has_gpu=False), shipped=False)
    return made.plan.phases


@pytest.mark.parametrize("plan", shipped_names(data_path("configs") / "plans"))
@pytest.mark.parametrize("profile", profile_names())
def test_shipped_plans_fit_shipped_profiles(profile: str, plan: str) -> None:
    machine = load_profile(profile)
    made = with_plan(machine, load_plan(plan, has_gpu=machine.has_gpu), shipped=True)
    asked = {check.partition(".")[0] for check in made.required}
    assert asked == set(made.plan.phases), "each phase has a gate"


def test_production_is_the_documents_steps() -> None:
    plan = load_plan("production")
    steps = {name: one.steps for name, one in plan.phases.items() if one}
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
    assert load_plan(path).phases["smoke"].steps == 40


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
