"""The command line of `nsa.inject`: wrong words are told, before torch is loaded."""

from __future__ import annotations

import pytest

from nsa.inject.__main__ import KINDS, _parser, main
from nsa.inject.hooks import EVERY_RANK


def test_help_names_every_fault_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "TRAINER_ARGUMENTS" in shown and "-m nsa.inject kill" in shown
    assert set(KINDS) <= {word.strip(",") for word in shown.split()}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "the following arguments are required: KIND, RANK, STEP"),
        (["kil", "0", "1", "--"], "no fault 'kil'; did you mean kill?"),
        (["kill", "one", "1", "--"], "'one' is no whole number"),
        (["kill", "0", "1"], "the trainer's own arguments follow after --"),
    ],
)
def test_wrong_words_are_usage_errors(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_all_ranks_are_a_rank_too() -> None:
    assert _parser().parse_args(["zero_gradients", "-1", "6"]).rank == EVERY_RANK
    with pytest.raises(SystemExit):
        _parser().parse_args(["zero_gradients", "-2", "6"])
