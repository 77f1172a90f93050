"""Reading, judging and rendering a run of a million rows and a million heartbeats: CPU and memory.

    python -m benchmarks.read_run [--rows N] [--heartbeats N] [--keep DIR]

Writes such a run directory (not timed), then in a fresh process: reads it as evidence, takes the
long run's statistics (last-50, typical, effective, time lost, steady, memory plateau) and renders a
report from them. Prints seconds of CPU and the largest resident memory; exits 1 beyond the budget
of 4 s and 350 MiB: on a machine that does nothing else, since neighbors cost processor time too.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUDGET_CPU_S, BUDGET_MIB = 4.0, 350.0
HEADER = "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s,host_s"
TOKEN = "5e" * 16


def write_run(folder: Path, rows: int, heartbeats: int) -> None:
    """A run directory as the trainer writes it, with full-length floats."""
    source = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "training.csv").open("w") as out:
        out.write(HEADER + "\n")
        for step in range(1, rows + 1):
            dt = 0.1 + source.random() / 50
            out.write(
                f"{step},{5.5 + source.random() / 10!r},0.0003,{4096 / dt!r},4096,{dt!r},"
                f"{source.random()!r},512.5,,0,0,"
                f"{source.random() / 1e4!r},{source.random() / 1e4!r}\n"
            )
    with (folder / "heartbeat_rank0.jsonl").open("w") as out:
        for index in range(heartbeats):
            step, event = index // 3 + 1, ("step_start", "progress", "step_end")[index % 3]
            record: dict[str, object] = {
                "event": event, "ts": 1.7e9 + index * 0.03, "mono": 1000 + index * 0.03,
                "rank": 0, "pid": 1234, "token": TOKEN, "step": step, "phase": "step",
                "rss_mib": 512.25, "cuda_mib": None,
            }  # fmt: skip
            if event == "progress":
                record |= {
                    "loss": 5.5 + source.random(), "toks_per_s": 40000 * source.random(),
                    "fetch_s": 1e-4, "grad_norm": source.random(), "gate_entropy": 0.98,
                    "max_gate": 0.4,
                }  # fmt: skip
            out.write(json.dumps(record) + "\n")


def judge_and_render(root: Path) -> str:
    """What verify does with one phase of this size: evidence, statistics, a rendered report."""
    from runbook.engine.outputs import render
    from runbook.folder.launch.evidence import read_launch
    from runbook.records import (
        Check,
        Launch,
        LaunchEntry,
        LaunchResult,
        LaunchStatus,
        Outcome,
        PhaseRecord,
        Reason,
        RunRecord,
        Verdict,
    )  # fmt: skip
    from runbook.stats import (
        effective,
        last_window,
        memory_plateau,
        steady,
        step_times,
        time_lost,
        typical,
    )

    launch = Launch(
        name="run", phase="long_run", kind="trainer", argv=("python",), env={},
        run_dir="long_run/run", nproc=1, steps=1, timeout_s=1,
    )  # fmt: skip
    result = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token=TOKEN)
    evidence = read_launch(root, launch, result)
    log = evidence.training
    if log is None or evidence.problems:
        raise SystemExit(f"not read as written: {evidence.problems}")
    measurements = (last_window(log), typical(log), effective(log), time_lost(log))
    decisions = (
        steady(step_times(log)),
        memory_plateau(
            log.frame["step"].to_numpy(), log.frame["mem_mib"].to_numpy(),
            project_to_step=2_000_000, limit=1e6,
        ),
    )  # fmt: skip
    checks = tuple(
        Check(
            id=f"long_run.decision_{index}", phase="long_run", question="?",
            outcome=Outcome.PASS, code=Reason.OK, reason=str(decision.reason) or "ok",
        )
        for index, decision in enumerate(decisions)
    )  # fmt: skip
    phase = PhaseRecord(
        name="long_run", title="Long run", source="benchmark", outcome=Outcome.PASS,
        launches=(LaunchEntry(launch=launch, result=result),), measurements=measurements,
        checks=checks,
    )  # fmt: skip
    record = RunRecord(
        tool_version="0", run_id="benchmark", profile="none", profile_sha256="0",
        profile_document={}, scope="benchmark", verdict=Verdict.GO, reasons=("benchmark",),
        started_at="2026-01-01T00:00:00Z", finished_at=None, command="", phases=(phase,),
        required=tuple(check.id for check in checks),
    )  # fmt: skip
    return "".join(render(record, fmt) for fmt in ("md", "html", "junit"))


def child(root: Path) -> None:
    """The measured process."""
    began = time.process_time()
    text = judge_and_render(root)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "cpu_s": time.process_time() - began,
                "rss_mib": usage.ru_maxrss / 1024,
                "report_bytes": len(text),
            }
        )
    )


def main() -> int:
    """Write the run, measure it, compare with the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--heartbeats", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, default=None, help="write here and do not remove")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        write_run(root / "long_run" / "run", options.rows, options.heartbeats)
        command = [sys.executable, "-m", "benchmarks.read_run", "--child", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(f"rows {options.rows}, heartbeats {options.heartbeats}")
    print(f"CPU      {found['cpu_s']:6.2f} s    budget {BUDGET_CPU_S:g} s")
    print(f"memory   {found['rss_mib']:6.0f} MiB  budget {BUDGET_MIB:g} MiB")
    return 0 if found["cpu_s"] <= BUDGET_CPU_S and found["rss_mib"] <= BUDGET_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
