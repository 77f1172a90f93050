"""Names of NCCL's variables: a slip is refused with the right name, an unknown one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.config.settings import mistyped, nccl_names, unknown_note
from tests.cli.shell import inside

WORDS = ("run", "--phase", "baseline", "--profile", "mine.yaml", "--dry-run")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("NCCL_ALG", "NCCL_ALGO"),
        ("NCCL_ALOG", "NCCL_ALGO"),
        ("NCCL_PROTOO", "NCCL_PROTO"),
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("NCCL_SOCKET_IFNANE", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_one_slip_of_the_hand_is_found(name: str, right: str) -> None:
    assert mistyped([name, "HOME", right]) == {name: right}


def test_no_name_that_is_read_is_taken_for_another() -> None:
    assert len(nccl_names()) > 200 and mistyped(nccl_names()) == {}
    assert not any(map(unknown_note, nccl_names()))
    assert unknown_note("NSA_ACCUM") == ""


@pytest.mark.parametrize("name", ["NCCL_OF_2030", "NCCL_ALGORITHM", "NCCL_"])
def test_what_a_newer_version_may_read_is_told_and_not_refused(name: str) -> None:
    assert mistyped([name]) == {}
    assert "another version may" in unknown_note(name)


def dry_run(folder: Path, *words: str, profile: str = "", **shell: str) -> tuple[int, str]:
    env = f"env: {{{profile}: {{value: x, source: a test}}}}\n" if profile else ""
    (folder / "mine.yaml").write_text(f"extends: cpu\nname: mine\n{env}", encoding="utf-8")
    ended = inside(*WORDS, *words, cwd=folder, **shell)
    return ended.code, ended.out + ended.err


def test_a_slip_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    told = "NCCL_ALG: NCCL reads NCCL_ALGO"
    code, said = dry_run(tmp_path, NCCL_ALG="Ring")
    assert code == 2 and f"in this shell: {told}" in said
    code, said = dry_run(tmp_path, "--set", "NCCL_ALG=Ring")
    assert code == 2 and f"--set {told}" in said
    code, said = dry_run(tmp_path, profile="NCCL_ALG")
    assert code == 2 and f"env.{told}" in said


def test_an_unknown_name_is_a_visible_warning_wherever_it_stands(tmp_path: Path) -> None:
    for words, shell, profile, who in (
        ((), {"NCCL_LATER": "x"}, "", "shell"),
        (("--set", "NCCL_LATER=x"), {}, "", "--set"),
        ((), {}, "NCCL_LATER", "profile mine"),
    ):
        code, said = dry_run(tmp_path, *words, profile=profile, **shell)
        assert code == 0, said
        assert f"NCCL_LATER=x ({who}, no name that NCCL 2.30.7 reads" in said
