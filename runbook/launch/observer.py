"""Who is told what happens during a run."""

from __future__ import annotations

from typing import Protocol

from runbook.records import Launch, LaunchResult, PhaseRecord, RunRecord


class Observer(Protocol):
    """Progress of one run, told in order. An observer decides nothing and must not block."""

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None: ...
    def phase_started(self, name: str, title: str, launches: int) -> None: ...
    def launch_started(self, launch: Launch, attempt: int) -> None: ...
    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None: ...
    def launch_finished(self, launch: Launch, result: LaunchResult) -> None: ...
    def phase_finished(self, record: PhaseRecord) -> None: ...
    def run_finished(self, record: RunRecord, run_root: str) -> None: ...
    def note(self, text: str) -> None: ...


class SilentObserver:
    """Says nothing; also a base for observers that care about a few events only."""

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None:
        """A run folder exists now."""

    def phase_started(self, name: str, title: str, launches: int) -> None:
        """The phase's plan is known, nothing of it has run."""

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """Processes of this launch are being started; attempts count from 1."""

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        """Rank 0 has done `step` of `total` steps."""

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """Nothing of this launch is alive any more."""

    def phase_finished(self, record: PhaseRecord) -> None:
        """The phase is judged and written."""

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        """Everything is written."""

    def note(self, text: str) -> None:
        """Something a person should read."""
