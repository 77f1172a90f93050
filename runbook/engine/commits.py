"""The two commits of a phase that compares them, found before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.collect import git
from runbook.records.phase import Phase

if TYPE_CHECKING:
    from runbook.engine.options import RunOptions

_DEFAULT_HEAD = "HEAD"


def with_commits(options: RunOptions, phases: Sequence[Phase]) -> tuple[RunOptions, list[str]]:
    """The options with both commits in full, and what is wrong with the names that were given.

    Without a phase that compares commits they stay as named: the command that runs another phase
    of the same run again names them too.
    """
    comparing = [phase.name for phase in phases if phase.compares_commits]
    if not comparing:
        return options, []
    checkout = git.find_checkout()
    if checkout is None:
        return options, [f"phase {comparing[0]} needs a git checkout; there is none here"]
    if not options.reference:
        return options, [f"phase {comparing[0]} needs --reference COMMIT to compare with"]
    reference, wrong = _found(checkout, "--reference", options.reference)
    head, also = _found(checkout, "--head", options.head or _DEFAULT_HEAD)
    return replace(options, reference=reference, head=head), [*wrong, *also]


def _found(checkout: Path, flag: str, name: str) -> tuple[str, list[str]]:
    """The commit in full, or as it was named with what is wrong with it."""
    sha = git.commit_of(checkout, name)
    if sha is not None:
        return sha, []
    return name, [f"{flag} {name}: no such commit in {checkout}; a shallow clone lacks older ones"]
