"""YAML that would take the parser's stack or all memory is told, and quickly."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.contract import NSAError
from nsa.strict_yaml import load_strict, scalar
from nsa.toggles import TOGGLES
from runbook.config.load import load_profile
from runbook.errors import UsageError

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
