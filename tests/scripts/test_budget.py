"""The budget counts code alone, and names what is over it and by how much."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import budget

PYPROJECT = budget.ROOT / "pyproject.toml"


def test_what_is_over_is_named_with_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {"nsa.code": 12, "commands": 3}
    monkeypatch.setattr(budget, "measured", lambda: now)
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.budget]\ncommands = 3\nnsa = {code = 12}\n")
    assert budget.main(["--pyproject", str(file)]) == 0
    assert capsys.readouterr().err == ""
    file.write_text("[tool.budget]\ncommands = 3\nnsa = {code = 10, files = 1}\n")
    assert budget.main(["--pyproject", str(file)]) == 1
    said = capsys.readouterr()
    assert "over budget: nsa.code: 12 is 2 over 10" in said.err
    assert "over budget: nsa.files: in one of both only" in said.err
    assert re.search(r"commands +3 +3", said.out)


@pytest.mark.slow
def test_the_project_is_within_its_budget_and_would_not_be_with_one_line_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, most = budget.measured(), budget.ceilings(PYPROJECT)
    monkeypatch.setattr(budget, "measured", lambda: now)
    assert budget.main([]) == 0
    file = tmp_path / "pyproject.toml"
    text = PYPROJECT.read_text()
    file.write_text(text.replace(f"code = {most['nsa.code']}", f"code = {now['nsa.code'] - 1}"))
    capsys.readouterr()
    assert budget.main(["--pyproject", str(file)]) == 1
    said = f"over budget: nsa.code: {now['nsa.code']} is 1 over {now['nsa.code'] - 1}\n"
    assert capsys.readouterr().err == said
