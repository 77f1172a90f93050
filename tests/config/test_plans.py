"""Plans: what a file says is what runs, and what is wrong with one is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.config import registry
from runbook.config.load import load_profile, profile_names
from runbook.config.plan import load_plan, with_plan
from runbook.errors import UsageError
from runbook.files import data_path, shipped_names

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


def test_the_validation_is_a_plan_too() -> None:
    made = with_plan(CPU, load_plan("validation"), shipped=True)
    assert made.plan is not None and not made.plan.stops
    assert list(made.plan.phases) == registry.standard_phases()
    assert set(made.required) == set(CPU.required)


def test_production_is_the_documents_steps() -> None:
    plan = load_plan("production")
    steps = {name: one.steps for name, one in plan.phases.items() if one.kind}
    assert steps == {"sanity": 1, "smoke": 300, "extended": 1000, "production": 50_000}
    assert plan.stops and plan.phases["production"].needs_go
    assert plan.phases["production"].steps // plan.phases["production"].legs == 5000


def test_a_profile_without_a_plan_has_no_word_of_one() -> None:
    document = CPU.model_dump(mode="json")
    assert "plan" not in document
    assert not any("stage" in settings for settings in document["phases"].values())


def test_a_plan_of_ones_own_says_only_what_differs(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "extends: production\nname: mine\n"
        "phases: {preflight: null, smoke: {steps: 40}, production: null}\n",
    )
    assert planned(path) == ("sanity", "smoke", "extended")
    assert load_plan(str(path)).phases["smoke"].steps == 40


SMOKE = (
    "schema_version: 1\nname: mine\ntitle: mine\nstops: true\nphases:\n  warm:\n"
    "    {{kind: training, title: t, steps: 4, timeout_s: 60, checks: [completed], source: s{}}}\n"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SMOKE.format(", legs: 3"), "phases.warm.legs: 3 do not divide 4 steps"),
        (SMOKE.format(", dataset: fineweb"), "no 'fineweb' (did you mean 'fineweb_edu'?)"),
        (SMOKE.format(", step: 3"), "warm.step: unknown key (did you mean 'steps'?); allowed: "),
        (SMOKE.format(", resume_steps: 4"), "expected fewer than the 4 steps"),
        (SMOKE.replace("completed", "finit").format(""), "no check 'finit'"),
        (
            SMOKE.replace("training", "trainin").format(""),
            "kind: no 'trainin' (did you mean 'training'?)",
        ),
        (SMOKE.replace("kind: training, ", "").format(""), "no such phase"),
        (SMOKE.replace("steps: 4, ", "").format(""), "phases.warm.steps: missing"),
        (SMOKE.replace("warm", "baseline").format(""), "an installed phase has this name"),
        (SMOKE.format(", env: {NSA_TB: {value: '1', source: s}}"), "no such toggle"),
        (SMOKE.format("") + "  preflight: {}\n", "phases run in the order preflight, warm"),
        (SMOKE.format("") + "limits: {memroy_gib: {value: 3, source: s}}\n", "no such limit"),
        (SMOKE.format("") + "stop: true\n", "stop: unknown key (did you mean 'stops'?); allowed: "),
        (SMOKE.format(", needs_go: true, dataset: fineweb_edu"), "no phase before it trains on"),
        (
            "extends: production\nname: mine\nphases:\n"
            "  smoke: {config_overrides: {data.tokenizer: gpt2}}\n  extended: null\n",
            "phases.production.dataset: no phase before it trains on fineweb_edu;",
        ),
        ("extends: prodction\n", "no plan 'prodction' (did you mean 'production'?)"),
    ],
)
def test_a_bad_plan_is_refused_with_what_is_allowed(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        planned(written(tmp_path, text))
    assert told in str(error.value)


def test_everything_wrong_with_a_phase_is_told_at_once(tmp_path: Path) -> None:
    text = SMOKE.replace("completed", "complete").format(", legs: 3, dataset: fineweb")
    with pytest.raises(UsageError) as error:
        planned(written(tmp_path, text))
    assert len(error.value.problems) == 3
