"""YAML that would take the parser's stack or all memory is told, and quickly."""

from __future__ import annotations

import pytest

from nsa.settings import load_strict

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
