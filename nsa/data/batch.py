"""What every source gives: batches, and the position from which it can go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from nsa.contract import NSAError


class DataError(NSAError):
    """The data cannot be read as asked; the message says what to do."""


class DataStallError(RuntimeError):
    """No batch arrived in time."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one rank.

    tokens [B, S+1] int64: inputs are [:, :-1], targets [:, 1:]. position: the state of the source
    right after this batch, small and free of tensors.
    """

    tokens: Tensor
    position: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """A rank's endless supply of batches."""

    floor_nats: float | None
    floor_source: str

    def fetch(self) -> Batch:
        """The next batch. Raises DataStallError when it does not come in time."""

    def validation(self, count: int) -> Iterator[Tensor]:
        """The same `count` batches [B, S+1] every time, from documents never trained on."""

    def seek(self, position: dict[str, Any]) -> None:
        """Go on right after the batch that carried `position`; only before the first fetch."""

    def close(self) -> None:
        """Stop threads and close files."""
