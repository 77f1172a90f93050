"""A thread that reads ahead, with a limit on how long a batch may take."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nsa.data.batch import Batch, DataStallError, Source

DEPTH = 4


class PrefetchSource:
    """Reads up to DEPTH batches of `inner` ahead of the training loop.

    The first batch may take `first_timeout_s`, every later one `steady_timeout_s`; then fetch
    raises DataStallError. An error of the reading thread is raised by the next fetch.
    """

    def __init__(self, inner: Source, *, first_timeout_s: float, steady_timeout_s: float) -> None:
        self.inner = inner
        self.floor_nats, self.floor_source = inner.floor_nats, inner.floor_source
        self.timeout_s, self.steady_timeout_s = first_timeout_s, steady_timeout_s
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=DEPTH)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._count = 0

    def fetch(self) -> Batch:
        """The next batch, waiting at most the timeout."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
            self._thread.start()
        try:
            item = self._queue.get(timeout=self.timeout_s)
        except queue.Empty:
            which = "first batch" if self._count == 0 else f"batch {self._count + 1}"
            raise DataStallError(
                f"data stall: the {which} did not come within {self.timeout_s:g} s "
                "(--loader-timeout); run --dataset synthetic to tell data from training"
            ) from None
        if isinstance(item, Exception):
            raise item
        self._count += 1
        self.timeout_s = self.steady_timeout_s
        return item

    def validation(self, count: int) -> Iterator[Tensor]:
        """Read directly: evaluation has its own budget."""
        return self.inner.validation(count)

    def seek(self, position: dict[str, Any]) -> None:
        """Go on after the given position; only before the first fetch."""
        self.inner.seek(position)

    def close(self) -> None:
        """Ask the thread to end; it is a daemon and never holds up the exit."""
        self._stop.set()

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                self._put(self.inner.fetch())
        except Exception as error:  # noqa: BLE001 - handed over to the training thread
            self._put(error)

    def _put(self, item: Batch | Exception) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.5)
                return
            except queue.Full:
                continue
