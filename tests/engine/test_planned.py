"""Settings that the trainer would refuse, or could not obey, are refused before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.contract import NSAError
from nsa.launch import asked as kernels
from nsa.launch.plan import plan_launch
from nsa.toggles import NEEDS_CUDA, TOGGLES
from runbook.config.machines import machines
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.errors import UsageError
from runbook.launch.command import completed
from runbook.records import Launch

EVERY_PROFILE = ("a100x2_pcie3", "a100x2_pcie4", "cpu", "h200x1")
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


@pytest.mark.parametrize("profile", EVERY_PROFILE)
def test_the_safe_mode_overrides_the_profile_and_says_so(profile: str) -> None:
    setup = prepare(RunOptions(profile=profile, phases="baseline", settings=(SAFE,)))
    assert setup.settings.toggles["NSA_DDP_COMPRESS"] == "off"
    assert setup.sources["NSA_DDP_COMPRESS"] == "safe mode (--set)"
    assert all(one.env["NSA_DDP_COMPRESS"] == "off" for one in setup.planned)
    assert "NSA_DDP_COMPRESS=off" in setup.options.settings  # so a rerun is the same


@pytest.mark.parametrize(
    ("shell", "typed", "text"),
    [
        ({}, (SAFE, "NSA_DDP_COMPRESS=bf16"), "NSA_DDP_COMPRESS=bf16"),
        ({"NSA_DDP_SAFE_MODE": "1", "NSA_DDP_COMPRESS": "bf16"}, (), "NSA_DDP_COMPRESS=bf16"),
        (
            {"NSA_DDP_SAFE_MODE": "1"},
            ("NSA_OPT_FUSED=1",),
            "NSA_DDP_SAFE_MODE=1 (shell) and NSA_OPT_FUSED=1 (--set) exclude each other: "
            "unset NSA_DDP_SAFE_MODE or leave out --set NSA_OPT_FUSED (planned in baseline)",
        ),
    ],
)
def test_what_is_asked_for_beside_or_over_the_safe_mode_contradicts_it(
    shell: dict[str, str], typed: tuple[str, ...], text: str
) -> None:
    found = refusal(*typed, phases="baseline", from_shell=shell)
    assert "exclude each other" in found and text in found


@pytest.mark.parametrize("protocol", ["blocks", "launches"])
def test_a_phase_that_a_setting_forbids_is_refused_by_name_and_starts_nothing_among_all(
    protocol: str,
) -> None:
    text = refusal(SAFE, phases="baseline,fused_adamw", protocol=protocol)
    assert f"{SAFE} forbids NSA_OPT_FUSED=1, so this needs a run without it" in text
    assert "leave out the setting, or the phase (--phase) (planned in fused_adamw)" in text
    plan = prepare(RunOptions(profile="cpu", settings=(SAFE,), protocol=protocol)).plan()
    assert [phase.name for phase, launches in plan if not launches] == ["fused_adamw"]


@pytest.mark.parametrize("source", ["shell", "--set"])
@pytest.mark.parametrize(
    ("setting", "arms"),
    [
        ("NSA_SDPA_FLASH_ONLY=1", {"default": "1", "flash_only": "1", "no_flash": "0"}),
        ("NSA_SDPA_NO_FLASH=1", {"default": "1", "flash_only": "0", "no_flash": "1"}),
    ],
)
def test_a_setting_of_sdpa_is_what_the_audit_has_by_default(
    setting: str, arms: dict[str, str], source: str
) -> None:
    name, _, value = setting.partition("=")
    typed = (setting,) if source == "--set" else ()
    shell = {} if typed else {name: value}
    plan = prepare(RunOptions(profile="cpu", settings=typed, from_shell=shell)).plan()
    (audit,) = next(launches for phase, launches in plan if phase.name == "sdpa_audit")
    assert audit.schedule is not None
    now = {arm: {**audit.env, **own}[name] for arm, own in audit.schedule.settings.items()}
    assert now == arms


def test_a_setting_against_a_profile_of_ones_own(tmp_path: Path) -> None:
    """The profile is sound, and so is the setting; together they are not."""
    mine = tmp_path / "mine.yaml"
    env = '{NSA_DDP_COMPRESS: {value: "off", source: a test}, '
    env += 'NSA_DDP_SAFE_MODE: {value: "1", source: a test}}'
    mine.write_text(f"extends: cpu\nname: mine\ntitle: mine\nenv: {env}\n")
    prepare(RunOptions(profile=str(mine), phases="baseline"))
    text = refusal("NSA_DDP_COMPRESS=fp16", profile=str(mine), phases="baseline")
    assert "NSA_DDP_SAFE_MODE=1 (profile mine) and NSA_DDP_COMPRESS=fp16 (--set)" in text
    assert "add --set NSA_DDP_SAFE_MODE=0 or leave out --set NSA_DDP_COMPRESS" in text


def accepted_by_the_trainer(launch: Launch) -> None:
    """Raise what the trainer itself says to this command and environment."""
    words = completed(launch).words()
    ranks = {"WORLD_SIZE": str(launch.nproc), "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    torchrun = words[0] == "torchrun"
    argv = words[words.index("-m") + 2 :]
    plan_launch(argv, {**launch.env, **(ranks if torchrun else {})})


@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu", "h200x1"])
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
        values = toggle.choices + ("0", "1") * (toggle.kind == "bool")
        for value in values:
            setting = f"{toggle.name}={value}"
            try:
                plan = prepare(RunOptions(profile=profile, settings=(setting,))).plan()
            except UsageError:
                refused.add(setting)
                continue
            launches = [launch for _, launches in plan for launch in launches]
            for launch in {launch.phase: launch for launch in launches}.values():
                if launch.kind == "trainer":
                    try:
                        accepted_by_the_trainer(launch)
                    except NSAError as error:
                        pytest.fail(f"{setting}, {launch.phase}/{launch.name}: {error}")
    no_board = set() if importlib.util.find_spec("tensorboard") else {"NSA_TB_DISABLE=0"}
    on_cuda = set(NEEDS_CUDA) if profile == "cpu" else set()
    never = {"NSA_USE_FA2=1"}
    assert refused == {*never, *on_cuda, *DECIDED, *no_board}


@pytest.mark.parametrize(
    ("setting", "phase", "own"),
    [
        ("NSA_DDP_BUCKET_MB=7", "bucket_sweep", "0.25"),
        ("NSA_OPT_FUSED=1", "fused_adamw", "0"),
        ("NSA_NVTX=0", "nvtx", "1"),
        ("NSA_DISABLE_CSV_LOGS=1", "baseline", "0"),
        ("NSA_TEST_SEL_PACK=0", "v2_parity", "1"),
    ],
)
def test_what_a_phase_decides_itself_is_refused_and_never_ignored(
    setting: str, phase: str, own: str
) -> None:
    text = refusal(setting, phases=phase)
    assert f"{setting} (--set) cannot be had where a phase itself decides it ({own})" in text
    assert f"leave out --set {setting.partition('=')[0]}" in text and phase in text
    name, _, value = setting.partition("=")
    assert f"unset {name}" in refusal(phases=phase, from_shell={name: value})


def test_a_preset_of_another_machine_is_refused() -> None:
    text = refusal(phases="all", preset="production")
    told = "NSA_DDP_BUCKET_MB=25 (preset production) cannot be had where a phase itself decides it"
    kept = "NSA_DDP_BUCKET_MB=0.5"
    assert told in text and "add --set NSA_DDP_BUCKET_MB=" in text
    prepare(RunOptions(profile="cpu", phases="all", preset="production", settings=(kept,)))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("NSA_USE_FA2=1", "NSA_USE_FA2=1 (--set) can never take effect: these branches"),
        ("NSA_CUDA_GRAPHS=1", "NSA_CUDA_GRAPHS=1 (--set): CUDA graphs need a CUDA device"),
        ("NSA_USE_TRITON_SEL=1", "NSA_USE_TRITON_SEL=1 (--set): its kernels need a CUDA device"),
        ("NSA_SCALER_BACKOFF_FACTOR=0.25", "only fp16 has a gradient scaler"),
        ("NSA_LR=0.1 train.lr=0.2", "NSA_LR=0.1 (--set) and train.lr=0.2 (--set) are the same"),
        (
            "NSA_SDPA_FLASH_ONLY=1 runtime.use_flash=false",
            "NSA_SDPA_FLASH_ONLY=1 (--set) and runtime.use_flash=false exclude each other",
        ),
        ("runtime.use_triton_sel=true", "use_triton_sel=true: its kernels need a CUDA device"),
        ("runtime.device=cuda", "the profile cpu is for cpu"),
        ("CONFIG=no_such.yaml", "CONFIG (--set): no trainer config 'configs/no_such.yaml'"),
        ("CONFIG=mine.yaml", "model.dimm: no such key"),
        ("CONFIG=mine.yaml", "train: missing"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZ=1", "the installed torch reads no such variable"),
    ],
)
def test_what_machine_config_and_torch_cannot_do(tmp_path: Path, settings: str, text: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: {dimm: 3}\n", encoding="utf-8")
    assert text in refusal(*settings.replace("mine.yaml", str(mine)).split(), phases="baseline")


@pytest.mark.parametrize(
    ("setting", "decided"),
    [
        ("train.steps=7", "(--steps "),
        ("data.dataset=synthetic", "(--dataset markov)"),
    ],
)
def test_a_config_key_that_a_flag_of_the_launch_overrides_is_refused(
    setting: str, decided: str
) -> None:
    plan = {"plan": "production", "steps_scale": 0.02, "without_go": True}
    text = refusal(setting, **plan)
    assert f"{setting} (--set) cannot be had: a phase decides it itself {decided}" in text
    assert f"leave out --set {setting.partition('=')[0]}" in text
    assert setting in refusal(setting, phases="long_run")


# By card: each has profiles of one to eight.
CARDS = sorted({name.rpartition("x")[0] for name in machines()})
FAST = ("NSA_USE_TRITON_SEL", "NSA_COMPILE", "NSA_CUDA_GRAPHS")


@pytest.mark.parametrize("card", CARDS)
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
