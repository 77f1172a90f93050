"""Real nights on this machine: the reference against itself, and against a commit that is slower.

    python -m benchmarks.nights --nights 20 --slower-nights 3 --until-s 3600

The repository is cloned into a temporary folder, where a commit on a branch of its own burns some
more processor time in every step. Each night is one `runbook run --phase regression` on the CPU
profile. Beside the nights as they ended, the plan is followed on nights drawn from all rounds that
really ran: few nights say little about a rate of one in a hundred.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.program import of_copy
from runbook.stats.decision import Decided
from runbook.stats.pairs import regression
from runbook.stats.plans import REGRESSION_PLAN

REPOSITORY = Path(__file__).resolve().parent.parent
_LOOP = "nsa/train/loop.py"
_ANCHOR = "        posted = self._post(outcome)\n"
# So much of what the step before took without it.
_BURN = """\
        begun = process_time()
        spent = (begun - getattr(self, "_burnt_at", begun)) / (1 + {share})
        while process_time() < begun + {share} * spent:
            pass
        self._burnt_at = begun
"""
_DRAWN = 4000
Rounds = list[tuple[float, float]]


def git(folder: Path, *words: str) -> str:
    """What git prints."""
    who = ("-c", "user.name=nights", "-c", "user.email=nights@localhost")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def clone_with_slower_commit(folder: Path, share: float) -> tuple[str, str]:
    """A clone of HEAD, and a branch whose trainer burns `share` more; both commits."""
    git(REPOSITORY, "clone", "--quiet", "--shared", str(REPOSITORY), str(folder))
    reference = git(folder, "rev-parse", "HEAD")
    git(folder, "checkout", "--quiet", "-b", "slower")
    path = folder / _LOOP
    text = path.read_text(encoding="utf-8")
    if text.count(_ANCHOR) != 1:
        raise SystemExit(f"{_LOOP} has no single line {_ANCHOR.strip()!r} to burn time before")
    path.write_text(text.replace(_ANCHOR, _BURN.format(share=share) + _ANCHOR), encoding="utf-8")
    git(folder, "commit", "--quiet", "--all", "--message", f"Burn {share:.0%} more in each step")
    slower = git(folder, "rev-parse", "HEAD")
    git(folder, "checkout", "--quiet", "--detach", reference)
    return reference, slower


def night(clone: Path, commits: tuple[str, str], seed: int, scale: float) -> dict[str, object]:
    """One night: its outcome, rounds, and how long it took."""
    out = clone.parent / f"night{seed}"
    command = [
        *(sys.executable, "-m", "runbook", "run", "--phase", "regression", "--profile", "cpu"),
        *("--reference", commits[0], "--head", commits[1], "--seed", str(seed)),
        *("--steps-scale", str(scale), "--out", str(out), "--quiet"),
    ]
    begun = time.monotonic()
    subprocess.run(command, cwd=clone, env=of_copy(clone), check=False, capture_output=True)
    record = json.loads(next(out.glob("*/run.json")).read_text(encoding="utf-8"))
    phase = next(one for one in record["phases"] if one["name"] == "regression")
    check = next(one for one in phase["checks"] if one["id"] == "regression.pace")
    paces = [float(one["value"]) for one in phase["measurements"]]
    return {
        "seed": seed,
        "slower": commits[0] != commits[1],
        "outcome": check["outcome"],
        "reason": check["reason"],
        "rounds": list(zip(paces[::2], paces[1::2], strict=True)),
        "launches": len(phase["launches"]),
        "load": os.getloadavg()[0],
        "minutes": round((time.monotonic() - begun) / 60, 2),
    }


def drawn(rounds: Rounds, *, seed: int = 0) -> tuple[float, float]:
    """Share of nights with an alarm, and mean rounds, where a night draws from these rounds."""
    rng = np.random.default_rng(seed)
    pairs = np.array(rounds)
    most = REGRESSION_PLAN.first + REGRESSION_PLAN.more
    alarms, used = 0, 0
    for _ in range(_DRAWN):
        chosen = pairs[rng.integers(0, len(pairs), most)]
        decision = regression(chosen[:, 0], chosen[:, 1], REGRESSION_PLAN)
        alarms += decision.outcome is Decided.FAIL
        used += decision.n
    return alarms / _DRAWN, used / _DRAWN


def summary(nights: list[dict[str, object]], *, slower: bool) -> str:
    """One Markdown row for all nights of a kind."""
    head = "slower" if slower else "equal"
    chosen = [one for one in nights if one["slower"] is slower]
    rounds: Rounds = [tuple(pair) for one in chosen for pair in one["rounds"]]  # type: ignore[attr-defined]
    outcomes = [str(one["outcome"]) for one in chosen]
    said = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes)) or "-"
    if len(rounds) < REGRESSION_PLAN.first:
        return (
            f"| {'slower' if slower else 'equal'} | {len(chosen)} | {said} | {len(rounds)} | | | |"
        )
    logs = np.log([second / first for first, second in rounds])
    alarm, used = drawn(rounds)
    wanted = 1 - (1 - alarm) ** 3 if slower else 30 * alarm
    rate = f"{wanted:.1%} found in 3 nights" if slower else f"{wanted:.2f} alarms in 30 nights"
    return (
        f"| {head} | {len(chosen)} | {said} | {len(rounds)} "
        f"| {np.expm1(logs.mean()):+.2%} ± {logs.std(ddof=1) / len(logs) ** 0.5:.2%} "
        f"| {logs.std(ddof=1):.2%} | {rate}, {used:.1f} rounds |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nights", type=int, default=20, help="of the reference against itself")
    parser.add_argument("--slower-nights", type=int, default=3)
    parser.add_argument("--slower-by", type=float, default=0.05, help="share of a step's CPU time")
    parser.add_argument("--steps-scale", type=float, default=1.0)
    parser.add_argument("--until-s", type=float, default=float("inf"), help="begin no night later")
    parser.add_argument("--json", type=Path, help="write every night here, after each")
    options = parser.parse_args()
    nights: list[dict[str, object]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nights-") as temporary:
        clone = Path(temporary) / "clone"
        reference, slower = clone_with_slower_commit(clone, options.slower_by)
        left = {reference: options.nights, slower: options.slower_nights}
        for seed in range(options.nights + options.slower_nights):
            if time.monotonic() - begun > options.until_s:
                break
            # In turn while there are both, so that both kinds see the same day.
            head = max(left, key=lambda one: (left[one] > 0, seed % 2 == (one == slower)))
            left[head] -= 1
            found = night(clone, (reference, head), seed, options.steps_scale)
            nights.append(found)
            if options.json:
                options.json.write_text(json.dumps(nights, indent=1) + "\n", encoding="utf-8")
            print({**found, "rounds": len(found["rounds"])}, file=sys.stderr)  # type: ignore[arg-type]
    print("| head | nights | ended | rounds | mean | spread | drawn from these rounds |")
    print("|---|---|---|---|---|---|---|")
    print(summary(nights, slower=False))
    print(summary(nights, slower=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
