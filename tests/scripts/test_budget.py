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
