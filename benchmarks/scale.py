"""How far one harness reaches: the ranks that it can follow, and the ranks that it can judge.

    python -m benchmarks.scale [--ranks 256] [--seconds 60] [--judged 1024]

Followed: `run_launch`, as any run uses it, starts one process that writes the heartbeats of all
ranks, a step each second, and training.csv. Counted is the processor time of the whole harness
between the fifth step and the last, and its resident memory at both. Judged: a baseline launch of
so many ranks is written (not counted), then a fresh process reads the folder and judges the phase.
Exits with 1 beyond the budgets: 5 % of a core, memory flat within 4 MiB, 30 s. 0 ranks: left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runbook.config.phase import PlanContext
    from runbook.records.evidence import RankLog

SHARE, GROWTH_MIB, JUDGED_S = 0.05, 4.0, 30.0
# Steps after which a launch has settled.
_SETTLED = 5
_MIB = 1 << 20


# -- the ranks that are followed -------------------------------------------------------------------


def write_ranks(ranks: int, steps: int) -> None:
    """All ranks of a launch in one process: each says of a step what the trainer would say."""
    from tests.factory import files

    folder, token = Path(os.environ["RUNBOOK_RUN_DIR"]), os.environ["RUNBOOK_RUN_TOKEN"]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as stack:
        streams = [
            stack.enter_context((folder / f"heartbeat_rank{rank}.jsonl").open("a", buffering=1))
            for rank in range(ranks)
        ]
        table = stack.enter_context((folder / "training.csv").open("a", buffering=1))
        table.write(files.HEADER + "\n")

        def say(step: int, phase: str, event: str, **more: object) -> None:
            for rank, file in enumerate(streams):
                own = {"rank": rank, "pid": os.getpid(), "token": token, "ts": time.time()}
                told = {**own, "step": step, "phase": phase, **more}
                file.write(files.beat(event, mono=time.monotonic(), **told))

        say(0, "init", "boot")
        began = time.monotonic()
        for step in range(1, steps + 1):
            phase = "first_step" if step == 1 else "step"
            say(step, "data", "step_start")
            say(step, phase, "fetched")
            time.sleep(max(0.0, began + step - 0.3 - time.monotonic()))
            say(step, phase, "progress", loss=5.5, toks_per_s=9000.0 + step % 7, grad_norm=1.0)
            time.sleep(max(0.0, began + step - time.monotonic()))
            say(step, phase, "step_end", embedded=128, data=f"{step:016x}", mem_mib=300.0)
            table.write(files.row(step, toks_per_s=9000.31 + step % 11, dt_s=1) + "\n")
        say(steps, "exit", "exit", code=0, reason="done", steps_done=steps, param_hash="cafe")


def resident_mib() -> float:
    """Memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def follow(ranks: int, seconds: int) -> tuple[float, float, float]:
    """Share of a core, and memory in MiB when the launch has settled and at its last step."""
    from runbook.launch import run_launch
    from runbook.launch.observer import Observer
    from runbook.records import Launch

    seen: list[tuple[float, float, float]] = []

    class Meter(Observer):
        def launch_progress(self, _l: Launch, step: int, total: int, _r: float | None) -> None:
            if _SETTLED <= step < total:
                seen.append((time.monotonic(), time.process_time(), resident_mib()))

    launch = Launch(
        name="followed", phase="baseline", kind="trainer", env={}, run_dir="followed",
        argv=("python", __file__, "--write", "--ranks", str(ranks), "--seconds", str(seconds)),
        nproc=ranks, steps=seconds, timeout_s=seconds + 300,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        result = run_launch(launch, Path(name), observer=Meter(), retry=False)
    if not result.ok:
        raise SystemExit(f"the launch did not end well: {result.status} {result.cause}")
    (began, before, first), *_, (ended, after, last) = seen
    return (after - before) / (ended - began), first, last


# -- the ranks that are judged ---------------------------------------------------------------------


def wide(ranks: int) -> PlanContext:
    """The cpu profile with so many ranks, a sequence each, and one launch of the baseline."""
    from tests.phases.builder import context, with_profile

    base = context("cpu")
    work = base.profile.workload.model_dump(mode="json") | {"global_batch": ranks}
    phases = base.profile.model_dump(mode="json")["phases"]
    phases["baseline"]["launches"] = 1
    return with_profile(base, ranks=ranks, workload=work, phases=phases)


def said(log: RankLog) -> Iterator[Mapping[str, Any]]:
    """A rank's heartbeats with all that the trainer says of each step."""
    from tests.phases.on_disk import records

    for record in records(log):
        now = {**record, "phase": "exit" if record["event"] == "exit" else "step"}
        if record["event"] == "progress":
            plain = {name: now[name] for name in ("ts", "mono", "rank", "pid", "token", "step")}
            plain |= {"rss_mib": 300.0, "cuda_mib": None}
            yield {"event": "step_start", **plain, "phase": "data"}
            yield {"event": "fetched", **plain, "phase": "step"}
        yield now


def write_folder(root: Path, ranks: int) -> None:
    """A healthy launch of the baseline, as its ranks would have left it."""
    from dataclasses import replace

    from runbook.config import registry
    from tests.factory.files import write_beats
    from tests.phases.on_disk import write_launch
    from tests.phases.traces import healthy

    where = wide(ranks)
    (launch,) = registry.phases()["baseline"].plan(where)
    made = healthy(launch, where.profile)
    folder = write_launch(root, replace(made, ranks=()))
    for log in made.ranks:
        write_beats(folder, log.rank, said(log))


def judge_folder(root: Path, ranks: int) -> None:
    """Read and judge it; prints processor time and the most memory of this process."""
    from runbook.config import registry
    from runbook.folder.launch.evidence import read_launch
    from runbook.records import LaunchResult, Outcome
    from runbook.records.evidence import PhaseEvidence

    where, phase = wide(ranks), registry.phases()["baseline"]
    (launch,) = phase.plan(where)
    text = (root / launch.run_dir / "result.json").read_text("utf-8")
    began = time.process_time()
    evidence = read_launch(root, launch, LaunchResult.model_validate_json(text))
    read = time.process_time()
    checks = phase.judge(PhaseEvidence(launches={launch.name: evidence}), where).checks
    ended = time.process_time()
    bad = [
        f"{c.id}: {c.reason}" for c in checks if c.outcome not in (Outcome.PASS, Outcome.SKIPPED)
    ]
    if bad or evidence.problems:
        raise SystemExit(f"not judged as written: {bad[:3]} {evidence.problems[:3]}")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"read_s": read - began, "judge_s": ended - read, "mib": most}))


def judged(ranks: int) -> Mapping[str, float]:
    """What a fresh process takes to read and to judge the folder."""
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), ranks)
        words = [sys.executable, "-m", "benchmarks.scale", "--judge", name, "--judged", str(ranks)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Mapping[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Follow, judge, compare with the budgets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--judged", type=int, default=1024)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_ranks(args.ranks, args.seconds)
        return 0
    if args.judge:
        judge_folder(args.judge, args.judged)
        return 0
    good = True
    if args.ranks:
        share, first, last = follow(args.ranks, args.seconds)
        good = share <= SHARE and last - first <= GROWTH_MIB
        print(f"follows {args.ranks} ranks at 1 step/s: {share:.2%} of a core, "
              f"{first:.1f} MiB, after {args.seconds} s {last:.1f} MiB", flush=True)  # fmt: skip
    if args.judged:
        found = judged(args.judged)
        good = good and found["read_s"] + found["judge_s"] <= JUDGED_S
        print(f"judges {args.judged} ranks: reads {found['read_s']:.1f} s, judges "
              f"{found['judge_s']:.1f} s of processor, {found['mib']:.0f} MiB at most")  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
