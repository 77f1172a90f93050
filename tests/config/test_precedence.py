"""Whose value wins: the profile, a preset, the caller's shell, `--set`; and nothing is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.config.extends import load_preset
from runbook.config.load import load_profile
from runbook.config.precedence import (
    differing,
    dropped,
    gathered,
    shell_settings,
    told,
    with_config,
    words,
)
from runbook.config.settings import Settings, is_passed_on, may_be_set, parse_settings
from runbook.errors import UsageError

PROFILE = load_profile("a100x2_pcie4")
SHELL = {
    "CONFIG": "configs/m7c_125m_2xa100_production_tuned.yaml",
    "NCCL_NET_GDR_LEVEL": "2",
    "NSA_DDP_BUCKET_MB": "50",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
PASSED_ON = {"CUDA_VISIBLE_DEVICES": "0", "HF_ENDPOINT": "http://hub", "PATH": "/bin"}
OTHERS = {"NSAFE": "1", "CONFIG_SHELL": "/bin/sh", "RUNBOOK_RUN_DIR": "/x", "OMP_NUM_THREADS": "3"}


def given(*typed: str, preset: str = "", **shell: str) -> Settings:
    named = load_preset(preset) if preset else None
    return gathered(PROFILE, parse_settings(typed), shell=shell_settings(shell), preset=named)


def test_settings_of_a_shell_are_the_families_and_config() -> None:
    assert shell_settings(SHELL | PASSED_ON | OTHERS) == SHELL
    assert shell_settings({"CONFIG": ""}) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING"),
        *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
    ],
)
def test_what_changes_numbers_or_speed_is_a_setting_and_not_passed_on_unseen(name: str) -> None:
    assert given(**{name: "1"}).sources == {name: "shell"}
    assert not is_passed_on(name) and may_be_set(name)


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HF_HUB_CACHE", "ALL_PROXY"])
def test_what_a_data_hub_needs_reaches_the_launches_unlisted(name: str) -> None:
    assert is_passed_on(name) and not dropped({name: "x"}) and not shell_settings({name: "x"})


def test_no_secret_of_a_data_hub_reaches_a_launch_and_the_line_names_it() -> None:
    assert not is_passed_on("HF_TOKEN")
    told = dropped({"HF_TOKEN": "hf_0123456789"})
    assert told.startswith("HF_TOKEN: ") and "hf_0123456789" not in told


def test_what_no_launch_gets_is_named_in_one_line() -> None:
    told = dropped({"TRITON_DEBUG": "1", "CUDA_CACHE_PATH": "/c", "EDITOR": "vi", **PASSED_ON})
    assert told == (
        "CUDA_CACHE_PATH, TRITON_DEBUG: no launch gets them; a profile's env can set them"
    )
    assert dropped({**PASSED_ON, **SHELL}) == ""


def test_a_later_layer_wins_and_is_named() -> None:
    name = "NSA_DDP_BUCKET_MB"
    for settings, value, source in (
        (given(preset="validated"), "25", "preset validated"),
        (given(preset="validated", NSA_DDP_BUCKET_MB="50"), "50", "shell"),
        (given(f"{name}=100", preset="validated", NSA_DDP_BUCKET_MB="50"), "100", "--set"),
    ):
        assert (settings.toggles[name], settings.sources[name]) == (value, source)


def test_the_words_of_a_run_ask_for_the_same_again_in_any_shell() -> None:
    settings = given("train.seed=7", **SHELL)
    again = parse_settings(words(settings))
    assert again.toggles == settings.toggles
    assert again.config == settings.config == "m7c_125m_2xa100_production_tuned.yaml"
    assert again.config_overrides == {"train.seed": 7}


def test_a_config_of_the_shell_is_that_of_every_launch() -> None:
    changed = with_config(PROFILE, given(**SHELL).config)
    assert {changed.config, changed.config_single} == {"m7c_125m_2xa100_production_tuned.yaml"}
    same = given(CONFIG="configs/m7c_125m_2xa100_production.yaml").config
    assert with_config(PROFILE, same) == PROFILE


def test_a_config_of_ones_own_is_kept_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("model: {}\n")
    monkeypatch.chdir(tmp_path)
    assert given(CONFIG="mine.yaml").config == str(tmp_path / "mine.yaml")


def test_an_old_name_takes_the_place_of_the_new_one() -> None:
    settings = given(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert settings.toggles == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_everything_wrong_with_a_shell_is_told() -> None:
    with pytest.raises(UsageError) as caught:
        given(NSA_BUKET="7", NSA_OPT_FUSED="maybe")
    text = str(caught.value)
    assert "in this shell: NSA_BUKET: no such toggle" in text
    assert "in this shell: NSA_OPT_FUSED='maybe': allowed is 0 or 1" in text


def test_what_is_listed_says_source_and_what_it_replaces() -> None:
    settings = given("NCCL_BLOCKING_WAIT=1", NSA_DDP_BUCKET_MB="50", NSA_DDP_STATIC_GRAPH="true")
    lines = list(told(settings.toggles, settings.sources, PROFILE.variables))
    assert lines[0] == "NSA_DDP_BUCKET_MB=50 (shell, the profile has 25)"
    assert lines[1] == "NSA_DDP_STATIC_GRAPH=true (shell, as in the profile)"
    (line,) = told({"train.lr": "1e6"}, {}, {"train.lr": "0.0003"})
    assert line == "train.lr=1e6 (--set, the config has 0.0003)"
    assert lines[2].startswith("NCCL_BLOCKING_WAIT=1 (--set, dropped: ")


def test_how_a_shell_differs_from_a_run_that_goes_on() -> None:
    held = {"NSA_OPT_FUSED": "1", "NSA_LR": "0.1", "NCCL_DEBUG": "INFO"}
    sources = {"NSA_OPT_FUSED": "shell", "NSA_LR": "shell", "NCCL_DEBUG": "--set"}
    now = {"NSA_OPT_FUSED": "0", "NSA_ACCUM": "2"}
    assert list(differing(held, sources, now)) == [
        "NSA_OPT_FUSED=0 here, 1 in the run",
        "NSA_ACCUM=2 here, not given to the run",
        "NSA_LR is not set here, 0.1 in the run",
    ]
    assert list(differing(held, sources, {"NSA_OPT_FUSED": "1", "NSA_LR": "0.1"})) == []


def test_the_safe_mode_overrides_what_lies_below_it_only() -> None:
    changed = {
        "NSA_DDP_COMPRESS": "off",
        "NSA_DDP_STATIC_GRAPH": "0",
        "NSA_SDPA_NO_FLASH": "1",
        "NSA_COMPILE": "off",
        "NSA_CUDA_GRAPHS": "0",
    }
    for settings, source in (
        (given(NSA_DDP_SAFE_MODE="1"), "safe mode (shell)"),
        (given("NSA_DDP_SAFE_MODE=1"), "safe mode (--set)"),
    ):
        assert settings.toggles == {"NSA_DDP_SAFE_MODE": "1", **changed}
        assert {settings.sources[name] for name in changed} == {source}
    both = given("NSA_DDP_COMPRESS=bf16", NSA_DDP_SAFE_MODE="1")
    assert both.toggles["NSA_DDP_COMPRESS"] == "bf16"  # which planning refuses
