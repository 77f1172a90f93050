"""Why a run ends."""

from __future__ import annotations

from pathlib import Path

from nsa.train.settle import halt_reason


def test_the_halt_files_first_line_is_the_reason(tmp_path: Path) -> None:
    path = tmp_path / ".HALT"
    assert halt_reason(path) == ".HALT"
    path.write_text("heartbeat stall\nmore\n")
    assert halt_reason(path) == ".HALT (heartbeat stall)"
