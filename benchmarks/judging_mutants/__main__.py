"""Mutants of the code that judges, and how many of them the tests kill.

    pip install -e '.[dev,mutants]'
    python -m benchmarks.judging_mutants --seed 1 --sample 150 --results DIR

    --results DIR  the coverage and what was killed are kept here, and not run again
    --workers N    so many copies of the repository at a time (default 2)

A site is a place in phases, verify, read or stats where cosmic-ray has a change to make.
Sites are drawn at random, then one change of each. What cannot change a verdict is not drawn:
annotations, and the arguments of dataclass decorators. Which tests run a line comes from one
measurement of coverage; a mutant meets all tests that run its statement, the slow
ones and those that start the trainer excepted, and then all runs that were kept
(tests/frozen). A mutant survives if they all pass.
The survivors that no test can kill stand in equivalents.yaml, each with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import yaml

from benchmarks.judging_mutants.copies import SURVIVED, Copies
from benchmarks.judging_mutants.sites import Mutant, sample
from benchmarks.planted.copy import ROOT
from benchmarks.program import append_line, read_lines

EQUIVALENTS = Path(__file__).with_name("equivalents.yaml")


def equivalents() -> dict[tuple[str, str, str], str]:
    """Why a mutant is no other program, by its file and its lines before and after."""
    listed = yaml.safe_load(EQUIVALENTS.read_text(encoding="utf-8")) or []
    return {(item["path"], item["before"], item["after"]): item["why"] for item in listed}


def _killed_before(kept: Path) -> dict[tuple[str, str, str], Mutant]:
    found = (Mutant(**row) for row in read_lines(kept) if row["outcome"].startswith("killed"))
    return {mutant.key: mutant for mutant in found}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judging_mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / "artifacts" / "judging_mutants")
    asked = parser.parse_args(words)
    asked.results.mkdir(parents=True, exist_ok=True)
    named = equivalents()
    kept = asked.results / f"seed-{asked.seed}.jsonl"
    known, chosen = _killed_before(kept), sample(asked.sample, asked.seed)
    found = [known[change.key] for change, _ in chosen if change.key in known]
    left = [(change, text) for change, text in chosen if change.key not in known]
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as scratch,
        ThreadPoolExecutor(asked.workers) as pool,
    ):
        copies = Copies(asked.results, Path(scratch), asked.workers)
        copies.measure()
        for done in as_completed([pool.submit(copies.judge, *one) for one in left]):
            found.append(done.result())
            print(json.dumps(asdict(found[-1])), flush=True)
            append_line(kept, asdict(found[-1]))
    alive = [one for one in found if one.outcome == SURVIVED]
    unnamed = [one for one in alive if one.key not in named]
    print(
        f"{len(found) - len(alive)} of {len(found)} killed, "
        f"{len(alive) - len(unnamed)} named as equivalent, {len(unnamed)} not (seed {asked.seed})",
        file=sys.stderr,
    )
    return 1 if unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
