"""`--set`: sorted into toggles and config keys, and every mistake in one message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nsa.contract import NSAError
from nsa.strict_yaml import load_strict, scalar
from nsa.toggles import TOGGLES
from runbook.config.extends import load_preset
from runbook.config.load import load_profile
from runbook.config.precedence import (
    differing,
    dropped,
    gathered,
    shell_settings,
    with_config,
    words,
)
from runbook.config.settings import (
    Settings,
    is_passed_on,
    may_be_set,
    mistyped,
    nccl_names,
    parse_settings,
    unknown_note,
)
from runbook.errors import UsageError
from runbook.records.own_trainer import LogMap, OwnTrainer
from tests.cli.shell import inside
from tests.config import cases


def test_toggles_variables_and_config_keys_are_told_apart() -> None:
    found = parse_settings(
        ["NCCL_DEBUG=INFO", "NSA_DDP_COMPRESS=off", "train.lr=1e-3", "train.seed=7",
         "runtime.use_flash=false", "data.local_path=a=b"]
    )  # fmt: skip
    assert found.toggles == {"NCCL_DEBUG": "INFO", "NSA_DDP_COMPRESS": "off"}
    assert found.config_overrides == {
        "train.lr": 1e-3, "train.seed": 7, "runtime.use_flash": False, "data.local_path": "a=b"
    }  # fmt: skip


# Types are strict, and a number that no launch can have is refused before any starts.
@pytest.mark.parametrize("case", cases("refused_settings"))
def test_what_is_wrong_is_refused_with_the_reason(case: str) -> None:
    typed, said = case.split(" -> ")
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_settings(typed.split())


# Whose value wins: the profile, a preset, the caller's shell, `--set`; and nothing is ignored.

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
    of_shell = shell_settings(shell)
    return gathered(PROFILE, parse_settings(typed), from_shell=of_shell, preset=named)


def test_settings_of_a_shell_are_the_families_and_config() -> None:
    assert shell_settings(SHELL | PASSED_ON | OTHERS) == SHELL
    assert shell_settings({"CONFIG": ""}) == {}


@pytest.mark.parametrize("name", ["NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "NCCL_IB_HCA"])
def test_what_changes_numbers_or_speed_is_a_setting_and_not_passed_on_unseen(name: str) -> None:
    assert given(**{name: "1"}).sources == {name: "shell"}
    assert not is_passed_on(name) and may_be_set(name)


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "ALL_PROXY", "SSL_CERT_FILE"])
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


def test_what_a_trainer_of_ones_own_does_not_get_is_named_whatever_its_name() -> None:
    own = OwnTrainer(
        name="t", command="t {steps} {ranks}", tokens_per_rank=1, env={"FOO": "1"}, source="test",
        log=LogMap(columns={"loss": "loss"}),
    )  # fmt: skip
    shell = {"FOO": "2", "WANDB_MODE": "offline", "MALLOC_ARENA_MAX": "2", "EDITOR": "vi"}
    told = dropped({**shell, **PASSED_ON}, own)
    assert told.startswith("MALLOC_ARENA_MAX, WANDB_MODE: no launch gets them; `env` ")
    assert "WANDB_MODE" not in dropped({**shell, **PASSED_ON})


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


def test_an_old_name_takes_the_place_of_the_new_one() -> None:
    settings = given(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert settings.toggles == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


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


# Names of NCCL's variables: a slip is refused with the right name, an unknown one is told.


@pytest.mark.parametrize(
    "name",
    ["NCCL_ALG", "NCCL_ALOG", "NCCL_ALGOO", "NCCL_ALGA"],
    ids=["less", "swapped", "more", "other"],
)
def test_one_slip_of_the_hand_is_found(name: str) -> None:
    assert mistyped([name, "HOME", "NCCL_ALGO"]) == {name: "NCCL_ALGO"}


def test_no_name_that_is_read_is_taken_for_another() -> None:
    assert len(nccl_names()) > 200 and mistyped(nccl_names()) == {}
    assert not any(map(unknown_note, nccl_names()))
    assert unknown_note("NSA_ACCUM") == ""


@pytest.mark.parametrize("name", ["NCCL_OF_2030", "NCCL_"])
def test_what_a_newer_version_may_read_is_told_and_not_refused(name: str) -> None:
    assert mistyped([name]) == {}
    assert "another version may" in unknown_note(name)


@pytest.mark.parametrize(
    ("words", "shell", "profile", "who"),
    [
        ((), {"NCCL_ALG": "x"}, "NCCL_X", "in this shell: "),
        (("--set", "NCCL_ALG=x"), {}, "NCCL_X", "--set "),
        ((), {}, "NCCL_ALG", "env."),
    ],
)
def test_a_slip_is_refused_wherever_it_stands(
    tmp_path: Path, words: tuple[str, ...], shell: dict[str, str], profile: str, who: str
) -> None:
    """And an unknown name is a visible warning."""
    env = f"env: {{{profile}: {{value: x, source: a test}}}}\n"
    (tmp_path / "mine.yaml").write_text(f"extends: cpu\nname: mine\n{env}", encoding="utf-8")
    run = ("run", "--phase", "baseline", "--profile", "mine.yaml", "--dry-run")
    ended = inside(*run, *words, cwd=tmp_path, **shell)
    assert ended.code == 2 and f"{who}NCCL_ALG: NCCL reads NCCL_ALGO" in ended.err
    if profile == "NCCL_X":
        told = inside(*run, cwd=tmp_path)
        assert told.code == 0 and "NCCL_X=x (profile mine, no name that NCCL" in told.out


# YAML that would take the parser's stack or all memory is told, and quickly.

_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 300 + "]" * 300, "nested over 64 deep"),
        ("[" * 5000 + "]" * 5000, "nested over 64 deep"),
        (_BOMB, "aliases stand for over"),
    ],
)
def test_yaml_that_grows_without_bound_is_refused(text: str, words: str) -> None:
    data, (problem,) = load_strict(text)
    assert data is None and words in problem


@pytest.mark.parametrize("text", ["? [a, b]\n: 1", "? {a: b}\n: 1", "a: {[b]: 1}"])
def test_a_key_that_is_no_word_is_refused(text: str) -> None:
    assert load_strict(text) == (
        None,
        ["not valid YAML: line 1: a key is a word, not a list or a mapping"],
    )


def test_a_number_beyond_any_float_is_a_word(tmp_path: Path) -> None:
    """Python refuses to read one of 5,000 digits at all."""
    long = "9" * 5000
    assert load_strict(f"steps: {long}") == ({"steps": long}, []) and scalar(long) == long
    (tmp_path / "long.yaml").write_text(f"extends: cpu\nranks: {long}\n")
    with pytest.raises(UsageError, match=r"ranks: .* valid integer, got '9+\.\.\.$"):
        load_profile(str(tmp_path / "long.yaml"))
    with pytest.raises(NSAError, match="NSA_SEQ_LEN"):
        TOGGLES["NSA_SEQ_LEN"].parse("9" * 400)
