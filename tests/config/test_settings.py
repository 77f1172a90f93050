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
from runbook.config.precedence import dropped, gathered, shell_settings
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
from tests.factory.tables import table


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
    assert shell_settings({"CONFIG": "", "NCCL_VERSION": "2.28.3-1"}) == {}
    old = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert given(**old).toggles == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@table(__file__, "of_a_shell")
def test_what_changes_numbers_or_speed_is_a_setting_and_what_a_data_hub_needs_is_passed_on(
    name: str, passed_on: bool, setting: bool
) -> None:
    assert (is_passed_on(name), bool(shell_settings({name: "1"}))) == (passed_on, setting)
    assert not dropped({name: "1"})
    assert not setting or (may_be_set(name) and given(**{name: "1"}).sources == {name: "shell"})


def test_what_no_launch_gets_is_named_in_one_line_without_its_value() -> None:
    shell = {"TRITON_DEBUG": "1", "HF_TOKEN": "hf_0123456789", "EDITOR": "vi", **PASSED_ON}
    told = dropped(shell | {"NCCL_VERSION": "2.28.3-1"})
    names = "HF_TOKEN, NCCL_VERSION, TRITON_DEBUG"
    assert told == f"{names}: no launch gets them; a profile's env can set them"
    assert dropped({**PASSED_ON, **SHELL}) == "" and not is_passed_on("HF_TOKEN")


def test_what_a_trainer_of_ones_own_does_not_get_is_named_whatever_its_name() -> None:
    own = OwnTrainer(
        name="t", command="t {steps} {ranks}", tokens_per_rank=1, env={"FOO": "1"}, source="test",
        log=LogMap(columns={"loss": "loss"}),
    )  # fmt: skip
    shell = {"FOO": "2", "WANDB_MODE": "offline", "MALLOC_ARENA_MAX": "2", "EDITOR": "vi"}
    told = dropped({**shell, **PASSED_ON}, own)
    assert told.startswith("MALLOC_ARENA_MAX, WANDB_MODE: no launch gets them; `env` ")
    assert "WANDB_MODE" not in dropped({**shell, **PASSED_ON})


@table(__file__, "layers")
def test_a_later_layer_wins_and_is_named(
    typed: list[str], shell: dict[str, str], value: str, source: str
) -> None:
    settings, name = given(*typed, preset="validated", **shell), "NSA_DDP_BUCKET_MB"
    assert (settings.toggles[name], settings.sources[name]) == (value, source)


def test_the_words_of_a_run_ask_for_the_same_again_in_any_shell() -> None:
    settings = given("train.seed=7", **SHELL)
    again = parse_settings(settings.words())
    assert again.toggles == settings.toggles
    assert again.config == settings.config == "m7c_125m_2xa100_production_tuned.yaml"
    assert again.config_overrides == {"train.seed": 7}


def test_the_safe_mode_overrides_what_lies_below_it_only() -> None:
    changed = {"NSA_DDP_COMPRESS": "off", "NSA_DDP_STATIC_GRAPH": "0", "NSA_SDPA_NO_FLASH": "1"}
    changed |= {"NSA_COMPILE": "off", "NSA_CUDA_GRAPHS": "0"}
    settings = given(NSA_DDP_SAFE_MODE="1")
    assert settings.toggles == {"NSA_DDP_SAFE_MODE": "1", **changed}
    assert {settings.sources[name] for name in changed} == {"safe mode (shell)"}
    both = given("NSA_DDP_COMPRESS=bf16", NSA_DDP_SAFE_MODE="1")
    assert both.toggles["NSA_DDP_COMPRESS"] == "bf16"  # which planning refuses


# Names of NCCL's variables: a slip is refused with the right name, an unknown one is told.


@pytest.mark.parametrize("name", ["NCCL_ALG", "NCCL_ALOG", "NCCL_ALGOO", "NCCL_ALGA"])
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


@table(__file__, "slips")
def test_a_slip_is_refused_wherever_it_stands(
    tmp_path: Path, words: list[str], shell: dict[str, str], profile: str, who: str
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


NO_WORD = "not valid YAML: line 1: a key is a word, not a list or a mapping"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 300 + "]" * 300, "nested over 64 deep"),
        ("[" * 5000 + "]" * 5000, "nested over 64 deep"),
        (_BOMB, "aliases stand for over"),
        *((text, NO_WORD) for text in ("? [a, b]\n: 1", "? {a: b}\n: 1", "a: {[b]: 1}")),
    ],
)
def test_yaml_that_grows_without_bound_or_has_a_key_that_is_no_word_is_refused(
    text: str, words: str
) -> None:
    data, (problem,) = load_strict(text)
    assert data is None and words in problem


def test_a_number_beyond_any_float_is_a_word(tmp_path: Path) -> None:
    """Python refuses to read one of 5,000 digits at all."""
    long = "9" * 5000
    assert load_strict(f"steps: {long}") == ({"steps": long}, []) and scalar(long) == long
    (tmp_path / "long.yaml").write_text(f"extends: cpu\nranks: {long}\n")
    with pytest.raises(UsageError, match=r"ranks: .* valid integer, got '9+\.\.\.$"):
        load_profile(str(tmp_path / "long.yaml"))
    with pytest.raises(NSAError, match="NSA_SEQ_LEN"):
        TOGGLES["NSA_SEQ_LEN"].parse("9" * 400)
