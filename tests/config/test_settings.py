"""`--set`: sorted into toggles and config keys, and every mistake in one message."""

from __future__ import annotations

import pytest

from runbook.config.settings import config_keys, parse_settings
from runbook.errors import UsageError


def test_toggles_variables_and_config_keys_are_told_apart() -> None:
    found = parse_settings(
        ["NSA_OPT_FUSED=1", "NCCL_DEBUG=INFO", "train.lr=1e-3", "train.seed=7", "nsa.phi=mlp"]
    )
    assert found.toggles == {"NSA_OPT_FUSED": "1", "NCCL_DEBUG": "INFO"}
    assert found.config_overrides == {"train.lr": 1e-3, "train.seed": 7, "nsa.phi": "mlp"}


def test_values_may_hold_equals_signs_and_words_that_yaml_would_bend() -> None:
    assert parse_settings(["data.local_path=a=b"]).config_overrides == {"data.local_path": "a=b"}
    assert parse_settings(["NSA_DDP_COMPRESS=off"]).toggles == {"NSA_DDP_COMPRESS": "off"}
    assert parse_settings(["runtime.use_flash=false"]).config_overrides == {
        "runtime.use_flash": False
    }


def test_everything_wrong_is_in_one_message() -> None:
    given = [
        "NSA_OPT_FUSE=1", "train.sequ_len=3", "plain", "=3", "train.seq_len=1", "train.lr=fast",
        "NSA_DDP_BUCKET_MB=abc", "train.seed=1", "train.seed=2",
    ]  # fmt: skip
    with pytest.raises(UsageError) as caught:
        parse_settings(given)
    message = str(caught.value)
    for part in (
        "(did you mean 'NSA_OPT_FUSED'?)",
        "(did you mean 'train.seq_len'?)",
        "'plain': expected KEY=VALUE",
        "'=3': expected KEY=VALUE",
        "train.seq_len: Input should be greater than or equal to 2, got 1",
        "train.lr: Input should be a valid number, got 'fast'",
        "NSA_DDP_BUCKET_MB='abc'",
        "train.seed: given twice",
    ):
        assert part in message
    assert len(caught.value.problems) == 8


def test_contradictions_are_told() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        parse_settings(["NSA_SDPA_FLASH_ONLY=1", "NSA_SDPA_NO_FLASH=1"])


@pytest.mark.parametrize("pair", ["runtime.use_flash=1", "train.seed=true", "train.steps=1.5"])
def test_types_are_strict(pair: str) -> None:
    with pytest.raises(UsageError, match=pair.split("=")[0]):
        parse_settings([pair])


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("train.seed=99999999999999999999999", f"less than or equal to {2**63 - 1}, got 9999"),
        ("train.steps=99999999999", f"less than or equal to {2**31 - 1}, got 99999999999"),
        ("train.seq_len=99999999999", f"less than or equal to {2**31 - 1}"),
        ("train.lr=1e400", "a finite number, got inf"),
        ("train.out_dir=/etc", "every launch has a folder of its own in the run's; --out names"),
    ],
)
def test_a_number_that_no_launch_can_have_is_refused_before_any_starts(
    pair: str, said: str
) -> None:
    with pytest.raises(UsageError, match=rf"--set {pair.split('=')[0]}: .*{said}"):
        parse_settings([pair])


def test_every_key_of_a_trainer_config_can_be_set() -> None:
    keys = config_keys()
    assert {"model.dim", "nsa.l_sel", "data.tokenizer", "runtime.precision"} <= set(keys)
    assert {"train.seq_len", "train.batch_size", "train.accumulate_grad_batches"} <= set(keys)
