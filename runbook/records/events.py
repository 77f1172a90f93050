"""What is told of a run while it goes on, beside the events of its journal."""

from __future__ import annotations

from pydantic import Field

from runbook.records.measurement import Record


class SilentRank(Record):
    """A rank that has said nothing for longer than it usually does.

    `usual_s` is its median pause, null if it was heard too seldom; `state` is in words why it
    cannot speak, if the kernel knows.
    """

    rank: int = Field(ge=0)
    silent_s: float = Field(ge=0)
    usual_s: float | None = Field(ge=0)
    state: str


class Pulse(Record):
    """The ranks of a launch now; `wanted` is 0 for one that has no heartbeats.

    `busy` is what the slowest rank is in where that may take long (a `nsa.contract.Phase`), since
    `busy_s`. `silent` begins with the rank that the others wait for.
    """

    alive: int = Field(default=0, ge=0)
    wanted: int = Field(default=0, ge=0)
    busy: str = ""
    busy_s: float = Field(default=0.0, ge=0)
    silent: tuple[SilentRank, ...] = ()


class Forecast(Record):
    """How far a whole run is: seconds done, and seconds left if anything is known of the rest.

    `share` of the run is done. `unknown` launches are left of which nothing is known, so that more
    than `left_s` is left. `source` says in words what it rests on; `rough` if part of it rests on
    the profile's estimate alone, for an idle machine.
    """

    done_s: float = Field(ge=0)
    share: float = Field(ge=0, le=1)
    left_s: float | None = Field(default=None, ge=0)
    unknown: int = Field(default=0, ge=0)
    source: str = ""
    rough: bool = False
