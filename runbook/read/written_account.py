"""The account of writing: a row is in its file when the rank says that it is written."""

from __future__ import annotations

from collections.abc import Sequence

from runbook.records import RankExit


def written_account(exits: Sequence[RankExit]) -> list[str]:
    """Files that were behind their rank's heartbeats while the launcher looked."""
    return [
        f"{name} was up to {steps} steps behind what rank {end.rank} said of itself while it ran: "
        "its rows were not written as they came"
        for end in exits
        for name, steps in sorted(end.late_rows.items())
    ]
