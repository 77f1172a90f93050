"""Settings that the trainer would refuse, or could not obey, are refused before anything starts.

How long the rest takes is told from measured steps, and limits that will be exceeded at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.contract import NSAError
from nsa.launch import asked as kernels
from nsa.launch.plan import plan_launch
from nsa.toggles import NEEDS_CUDA, TOGGLES
from runbook.config.load import load_profile
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.engine.plan.progress import Forecaster, Pace, forecast
from runbook.errors import UsageError
from runbook.launch.command import completed
from runbook.launch.observer import Forecast, Observer, Pulse
from runbook.records import Launch, LaunchResult, LaunchStatus
from tests.config import cases
from tests.phases import builder
from tests.reports import samples

SAFE = "NSA_DDP_SAFE_MODE=1"
# What a phase decides for itself, so that a run of all phases cannot have it.
DECIDED = {
    *("NSA_SDPA_AUDIT=0", "NSA_NVTX=0", "NSA_OPT_FUSED=1"),
    *("NSA_DISABLE_CSV_LOGS=1", "NSA_TEST_SEL_PACK=0"),
}


def refusal(*settings: str, profile: str = "cpu", phases: str = "all", **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        prepare(RunOptions(profile=profile, phases=phases, settings=settings, **options))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
def test_the_safe_mode_overrides_the_profile_and_says_so(profile: str) -> None:
    setup = prepare(RunOptions(profile=profile, phases="baseline", settings=(SAFE,)))
    assert setup.settings.toggles["NSA_DDP_COMPRESS"] == "off"
    assert setup.sources["NSA_DDP_COMPRESS"] == "safe mode (--set)"
    assert all(one.env["NSA_DDP_COMPRESS"] == "off" for one in setup.planned)
    assert "NSA_DDP_COMPRESS=off" in setup.options.settings  # so a rerun is the same


def test_what_is_asked_for_beside_or_over_the_safe_mode_contradicts_it() -> None:
    shell = {"NSA_DDP_SAFE_MODE": "1"}
    beside = refusal(phases="baseline", from_shell=shell | {"NSA_DDP_COMPRESS": "bf16"})
    assert "NSA_DDP_COMPRESS=bf16" in beside and "exclude each other" in beside
    assert (
        "NSA_DDP_SAFE_MODE=1 (shell) and NSA_OPT_FUSED=1 (--set) exclude each other: "
        "unset NSA_DDP_SAFE_MODE or leave out --set NSA_OPT_FUSED (planned in baseline)"
    ) in refusal("NSA_OPT_FUSED=1", phases="baseline", from_shell=shell)


@pytest.mark.parametrize("protocol", ["blocks", "launches"])
def test_a_phase_that_a_setting_forbids_is_refused_by_name_and_starts_nothing_among_all(
    protocol: str,
) -> None:
    text = refusal(SAFE, phases="baseline,fused_adamw", protocol=protocol)
    assert f"{SAFE} forbids NSA_OPT_FUSED=1, so this needs a run without it" in text
    assert "leave out the setting, or the phase (--phase) (planned in fused_adamw)" in text
    plan = prepare(RunOptions(profile="cpu", settings=(SAFE,), protocol=protocol)).plan()
    assert [phase.name for phase, launches in plan if not launches] == ["fused_adamw"]


@pytest.mark.parametrize("source", ["from_shell", "settings"])
@pytest.mark.parametrize(
    ("name", "arms"), [("NSA_SDPA_FLASH_ONLY", "110"), ("NSA_SDPA_NO_FLASH", "101")]
)
def test_a_setting_of_sdpa_is_what_the_audit_has_by_default(
    name: str, arms: str, source: str
) -> None:
    given: dict[str, Any] = {"from_shell": {name: "1"}, "settings": (f"{name}=1",)}
    plan = prepare(RunOptions(profile="cpu", **{source: given[source]})).plan()
    (audit,) = next(launches for phase, launches in plan if phase.name == "sdpa_audit")
    assert audit.schedule is not None
    own = audit.schedule.settings
    now = [{**audit.env, **own[arm]}[name] for arm in ("default", "flash_only", "no_flash")]
    assert "".join(now) == arms


def accepted_by_the_trainer(launch: Launch, setting: str) -> None:
    """Fails with what the trainer itself says to this command and environment."""
    words = completed(launch).words()
    ranks = {"WORLD_SIZE": str(launch.nproc), "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    argv = words[words.index("-m") + 2 :]
    try:
        plan_launch(argv, {**launch.env, **(ranks if words[0] == "torchrun" else {})})
    except NSAError as error:
        pytest.fail(f"{setting}, {launch.phase}/{launch.name}: {error}")


@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
def test_what_is_planned_is_what_the_trainer_accepts(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any yes/no toggle or choice: refused when planned, or accepted in every launch.

    On a machine with every package: which are installed is found out where the launch runs.
    """
    installed = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.setattr(kernels, "importlib", installed)
    refused = set()
    for toggle in TOGGLES.values():
        for value in (*toggle.choices, *("0", "1") * (toggle.kind == "bool")):
            setting = f"{toggle.name}={value}"
            try:
                plan = prepare(RunOptions(profile=profile, settings=(setting,))).plan()
            except UsageError:
                refused.add(setting)
                continue
            launches = [launch for _, launches in plan for launch in launches]
            for launch in {launch.phase: launch for launch in launches}.values():
                if launch.kind == "trainer":
                    accepted_by_the_trainer(launch, setting)
    no_board = set() if importlib.util.find_spec("tensorboard") else {"NSA_TB_DISABLE=0"}
    on_cuda = set(NEEDS_CUDA) if profile == "cpu" else set()
    assert refused == {"NSA_USE_FA2=1", *on_cuda, *DECIDED, *no_board}


def test_what_a_phase_decides_itself_is_refused_and_never_ignored() -> None:
    text = refusal("NSA_DDP_BUCKET_MB=7", phases="bucket_sweep")
    told = "NSA_DDP_BUCKET_MB=7 (--set) cannot be had where a phase itself decides it (0.25)"
    assert told in text and "leave out --set NSA_DDP_BUCKET_MB" in text and "bucket_sweep" in text
    shell = {"NSA_DDP_BUCKET_MB": "7"}
    assert "unset NSA_DDP_BUCKET_MB" in refusal(phases="bucket_sweep", from_shell=shell)


def test_a_preset_of_another_machine_is_refused() -> None:
    text = refusal(phases="all", preset="production")
    told = "NSA_DDP_BUCKET_MB=25 (preset production) cannot be had where a phase itself decides it"
    kept = "NSA_DDP_BUCKET_MB=0.5"
    assert told in text and "add --set NSA_DDP_BUCKET_MB=" in text
    prepare(RunOptions(profile="cpu", phases="all", preset="production", settings=(kept,)))


@pytest.mark.parametrize("case", cases("refused_launches"))
def test_what_machine_config_and_torch_cannot_do(tmp_path: Path, case: str) -> None:
    settings, text = case.split(" -> ")
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: {dimm: 3}\n", encoding="utf-8")
    assert text in refusal(*settings.replace("mine.yaml", str(mine)).split(), phases="baseline")


def test_a_config_key_that_a_flag_of_the_launch_overrides_is_refused() -> None:
    plan = {"plan": "production", "steps_scale": 0.02, "without_go": True}
    text = refusal("train.steps=7", **plan)
    assert "train.steps=7 (--set) cannot be had: a phase decides it itself (--steps " in text
    assert "leave out --set train.steps" in text


PROFILE = load_profile("a100x2_pcie4")
WHERE = builder.context("a100x2_pcie4")


# Three launches of a hundred steps, however many a profile has.
def plan(phase: str) -> list[Launch]:
    launches = builder.PHASES[phase].plan(WHERE)
    if phase not in ("baseline", "single_gpu"):
        return launches
    return [launch.model_copy(update={"steps": 100}) for launch in launches[:3]]


BASE = plan("baseline")[0]
PACE = Pace(step_s=0.25, startup_s=10.0, launch=BASE)


def test_one_device_with_the_whole_batch_takes_longer_and_with_its_share_the_same() -> None:
    whole, share = plan("single_gpu")[:2]
    assert forecast(whole, PACE, PROFILE) == 10.0 + 100 * 0.5
    assert forecast(share, PACE, PROFILE) == 10.0 + 100 * 0.25
    assert {forecast(launch, PACE, PROFILE) for launch in plan("preflight")} == {None}


class Told(Observer):
    def __init__(self) -> None:
        self.notes, self.forecasts = list[str](), list[Forecast]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def run_forecast(self, forecast: Forecast) -> None:
        self.forecasts.append(forecast)

    @property
    def left_s(self) -> float | None:
        return self.forecasts[-1].left_s


def watched(
    monkeypatch: pytest.MonkeyPatch, launches: Sequence[Launch], step_s: float, steps: int
) -> tuple[Forecaster, Told, SimpleNamespace]:
    told, clock = Told(), SimpleNamespace(now=0.0)
    monkeypatch.setattr("runbook.engine.plan.progress.monotonic", lambda: clock.now)
    forecaster = Forecaster(told, launches, PROFILE)
    forecaster.run_started("id", "folder", ())
    forecaster.launch_started(BASE, 1)
    clock.now += 10.0
    for step in range(1, 1 + steps):
        clock.now += 5.0 if step == 1 else step_s
        forecaster.launch_progress(BASE, step, BASE.steps, None)
        forecaster.launch_ranks(BASE, Pulse())
    return forecaster, told, clock


def test_after_some_steps_the_rest_is_known_and_a_hang_makes_nothing_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forecaster, told, clock = watched(monkeypatch, plan("baseline"), 0.25, 20)
    # 80 of 100 steps are left of this launch (told up to one second ago), and two whole ones with
    # their start-up of 15 s: the first step belongs to it.
    left_s = 80 * 0.25 + 2 * (15.0 + 25.0)
    assert told.left_s == pytest.approx(left_s, abs=1.0)
    done_s = 10.0 + 5.0 + 19 * 0.25
    assert told.forecasts[-1].share == pytest.approx(done_s / (done_s + 100.0), abs=0.02)
    assert "0.25 s per step" in told.forecasts[-1].source
    for _ in range(60):
        clock.now += 1.0
        forecaster.launch_ranks(BASE, Pulse())
    assert told.left_s == pytest.approx(left_s, abs=1.0)
    forecaster.launch_finished(BASE, LaunchResult(status=LaunchStatus.COMPLETED))
    assert told.left_s == pytest.approx(2 * 40.0, abs=1.0)
    forecaster.phase_finished(samples.go().phases[1])
    assert (told.left_s, told.forecasts[-1].share) == (0.0, 1.0), "nothing left is all done"
    shares = [one.share for one in told.forecasts]
    assert shares == sorted(shares) and shares[0] >= 0.0


def test_a_limit_that_will_be_exceeded_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [*plan("preflight"), *plan("baseline"), *plan("long_run")]
    _, told, _ = watched(monkeypatch, launches, 6.0, 10)
    assert told.forecasts[-1].unknown == 2, "those of preflight train nothing"
    (note,) = told.notes
    assert note.startswith("long_run/run would take ")
    assert "phases.long_run.timeout_s" in note and "(6 s per step)" in note


@pytest.mark.parametrize("name", [name for name in vars(Observer) if not name.startswith("_")])
def test_the_forecaster_forwards_whatever_an_observer_can_hear(name: str) -> None:
    inner = Told()
    forecaster = Forecaster(inner, [BASE], load_profile("cpu"))
    passed_on = getattr(forecaster, name) == getattr(inner, name)
    assert name in vars(Forecaster) or passed_on, f"{name} would be swallowed"
