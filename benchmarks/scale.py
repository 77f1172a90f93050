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
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runbook.config.phase import PlanContext

SHARE, GROWTH_MIB, JUDGED_S = 0.05, 4.0, 30.0
# Steps after which a launch has settled.
_SETTLED = 5
_MIB = 1 << 20
_HERE = "benchmarks.scale"


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
    from runbook.launch import LaunchOptions, run_launch
    from runbook.launch.observer import Observer
    from runbook.records import Launch

    seen: list[tuple[float, float, float]] = []

    class Meter(Observer):
        def launch_progress(self, _l: Launch, step: int, total: int, _r: float | None) -> None:
            if _SETTLED <= step < total:
                seen.append((time.monotonic(), time.process_time(), resident_mib()))

    launch = Launch(
        name="followed", phase="baseline", kind="trainer", env={}, run_dir="followed",
        argv=("python", "-c", f"from {_HERE} import write_ranks; write_ranks({ranks}, {seconds})"),
        nproc=ranks, steps=seconds, timeout_s=seconds + 300,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        result = run_launch(launch, LaunchOptions(run_root=Path(name), observer=Meter()))
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


def write_folder(root: Path, ranks: int) -> None:
    """A healthy launch of the baseline, as its ranks would have left it."""
    from runbook.config import registry
    from tests.phases.on_disk import write_launch
    from tests.phases.traces import healthy

    where = wide(ranks)
    (launch,) = registry.phases()["baseline"].plan(where)
    write_launch(root, healthy(launch, where.profile))


def judge_folder(root: Path, ranks: int) -> tuple[float, float, float]:
    """Read and judge it: seconds of processor for both, and the most MiB of this process."""
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
        raise RuntimeError(f"not judged as written: {bad[:3]} {evidence.problems[:3]}")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return read - began, ended - read, most


def judged(ranks: int) -> tuple[float, float, float]:
    """The same in a fresh process, after the folder was written."""
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), ranks)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            return fresh.submit(judge_folder, Path(name), ranks).result()


def main() -> int:
    """Follow, judge, compare with the budgets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--judged", type=int, default=1024)
    args = parser.parse_args()
    good = True
    if args.ranks:
        share, first, last = follow(args.ranks, args.seconds)
        good = share <= SHARE and last - first <= GROWTH_MIB
        print(f"follows {args.ranks} ranks at 1 step/s: {share:.2%} of a core, "
              f"{first:.1f} MiB, after {args.seconds} s {last:.1f} MiB", flush=True)  # fmt: skip
    if args.judged:
        read_s, judge_s, mib = judged(args.judged)
        good = good and read_s + judge_s <= JUDGED_S
        print(f"judges {args.judged} ranks: reads {read_s:.1f} s, judges "
              f"{judge_s:.1f} s of processor, {mib:.0f} MiB at most")  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
