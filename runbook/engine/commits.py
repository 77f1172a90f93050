"""The two commits of a phase that compares them, found before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from runbook.collect import git
from runbook.records.phase import Phase

if TYPE_CHECKING:
    from runbook.engine.options import RunOptions

_DEFAULT_HEAD = "HEAD"


def with_commits(options: RunOptions, phases: Sequence[Phase]) -> tuple[RunOptions, list[str]]:
    """The options with both commits in full, and what is wrong with the names that were given.

    Without a phase that compares commits, naming one is wrong: nothing would come of it.
    """
    given = {"reference": options.reference, "head": options.head}
    named = {flag: name for flag, name in given.items() if name}
    comparing = [phase.name for phase in phases if phase.compares_commits]
    if not comparing:
        return options, [
            f"--{flag} {name}: no phase compares commits" for flag, name in named.items()
        ]
    checkout = git.find_checkout()
    if checkout is None:
        return options, [f"phase {comparing[0]} needs a git checkout; there is none here"]
    if not options.reference:
        return options, [f"phase {comparing[0]} needs --reference COMMIT to compare with"]
    wanted = {"reference": options.reference, "head": options.head or _DEFAULT_HEAD}
    found = {flag: git.commit_of(checkout, name) for flag, name in wanted.items()}
    problems = [
        f"--{flag} {wanted[flag]}: no such commit in {checkout}; a shallow clone lacks older ones"
        for flag, sha in found.items()
        if sha is None
    ]
    return replace(options, **{flag: sha for flag, sha in found.items() if sha}), problems
