"""Three records made by hand: one GO, one NO-GO, one cut off."""

from __future__ import annotations

import hashlib
import math

from runbook.records import (
    ArtifactRecord,
    Check,
    Comparator,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Mark,
    Measurement,
    Outcome,
    PhaseRecord,
    Reason,
    RunRecord,
    Series,
    Table,
    Verdict,
    Window,
)
from tests.factory.records import check, launch, phase

REQUIRED = ("preflight.artifacts", "baseline.throughput", "bucket_sweep.best", "long_run.no_halt")
RERUN = "runbook run --phase {} --profile a100x2_pcie4"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def measured(value: float | bool | str, unit: str, path: str, **more: object) -> Measurement:
    fields: dict[str, object] = {"name": path.rpartition("/")[2], "n": 1, "window": None} | more
    return Measurement.model_validate(
        {"value": value, "unit": unit, "path": path, "sha256": digest(path), **fields}
    )


def throughput(value: float, outcome: Outcome, code: Reason, reason: str) -> Check:
    good = outcome is Outcome.PASS
    log = "baseline/launch_0/training.csv"
    window = Window(first_step=51, last_step=100)
    spread = {"stdev": value / 40, "interval": (value * 0.97, value * 1.03)}
    return _held(
        outcome,
        code,
        reason=reason,
        measurement=measured(value, "tok/s", log, n=3, window=window, **spread),
        evidence=() if good else (log, "baseline/launch_0/env.json"),
        remedy="" if good else "set NSA_DDP_BUCKET_MB=50; check that flash is not disabled",
        rerun="" if good else RERUN.format("baseline"),
    )


def _held(outcome: Outcome, code: Reason, **told: object) -> Check:
    """The row that is held against the floor."""
    return check(
        "baseline.throughput",
        outcome,
        code,
        question="Is global throughput at or above the profile's floor?",
        comparator=Comparator.AT_LEAST,
        limit=39.0,
        limit_source="runbook, Acceptance: >= 39 tok/s",
        required=True,
        **told,
    )


def entry(phase: str, name: str, **result: object) -> LaunchEntry:
    words = "torchrun --nproc_per_node=2 -m nsa.train --ddp 1 --steps 100"
    started = launch(
        *words.split(),
        name=name,
        phase=phase,
        config="configs/m7c_125m_2xa100_production.yaml",
        env={"NSA_PREFILL_BATCHED": "1", "NCCL_ALGO": "Ring"},
        steps=100,
        timeout_s=900,
    )
    fields: dict[str, object] = {"status": LaunchStatus.COMPLETED, "exit_code": 0}
    fields |= {"duration_s": 61.5} | result
    return LaunchEntry(launch=started, result=LaunchResult.model_validate(fields))


def preflight() -> PhaseRecord:
    return phase(
        "preflight",
        check(
            "preflight.artifacts",
            question="Are commit, environment and devices on record?",
            measurement=measured(True, "", "git_sha.txt"),
            comparator=Comparator.IS_TRUE,
            reason="git_sha.txt, collect_env.txt and nvidia_smi.xml are written",
            required=True,
        ),
        check(
            "preflight.nvlink",
            Outcome.SKIPPED,
            Reason.NOT_GATED,
            question="Is there NVLink?",
            reason="recorded only: the profile expects PCIe",
        ),
        source="Runbook, Preflight (Snapshot & Sync)",
        duration_s=2.25,
        notes=("The checkout is clean.",),
    )


def sweep(outcome: Outcome = Outcome.PASS) -> PhaseRecord:
    good = outcome is Outcome.PASS
    log = "bucket_sweep/arms/training.csv"
    tie = "TIE: no size beats all others at the family error 1 %; 50 MB stays"
    best = check(
        "bucket_sweep.best",
        outcome,
        Reason.OK if good else Reason.TOO_FEW_SAMPLES,
        question="Which bucket size is best?",
        measurement=measured("tie", "", log, n=18),
        reason=tie if good else "only 2 of 6 rounds are valid",
        evidence=(log,),
        remedy="" if good else "run the sweep again on a machine that nothing else uses",
        rerun="" if good else RERUN.format("bucket_sweep"),
        required=True,
    )
    table = Table(
        title="Bucket size against the last 50 steps",
        columns=("bucket (MB)", "last-50 mean", "last-50 stdev", "n", "window", "source"),
        rows=(
            ("25 MB", 48.21, 1.07, 50, "steps 151-200", log),
            ("50 MB", 48.4, 0.92, 50, "steps 151-200", log),
            ("100 MB", 47.9, math.nan, 50, None, log),
        ),
        note="Mean and population stdev of toks_per_s.",
    )
    return phase(
        "bucket_sweep",
        best,
        title="DDP bucket sweep",
        source="Runbook, DDP Bucket Sweep",
        duration_s=182.0,
        tables=(table,),
        choices={"NSA_DDP_BUCKET_MB": "50"},
        launches=(entry("bucket_sweep", "arms"),),
    )


def long_run() -> PhaseRecord:
    log = "long_run/main/training.csv"
    no_halt = check(
        "long_run.no_halt",
        question="Did the run reach its last step without a halt?",
        measurement=measured(1200.0, "steps", log, n=1200),
        comparator=Comparator.EQUALS,
        limit=1200.0,
        limit_source="plan",
        reason="all 1200 steps, no .HALT",
        required=True,
    )
    curve = Series(
        name="Throughput",
        unit="tok/s",
        points=tuple((float(s), 46 + 2 * math.sin(s / 90)) for s in range(0, 1200, 12)),
        n=1200,
        limits=(Mark(label="limit", value=39.0),),
        path=log,
        sha256=digest(log),
    )
    return phase(
        "long_run",
        no_halt,
        title="Stability long run",
        source="Runbook, Stability Long-Run + Watchdog",
        duration_s=4000,
        measurements=(measured(81_234.5, "toks", log, n=1200),),
        series=(curve,),
        launches=(entry("long_run", "main"),),
    )


def baseline(check: Check, **result: object) -> PhaseRecord:
    return phase(
        "baseline",
        check,
        title="Baseline DDP throughput",
        source="Runbook, Baseline DDP Throughput (Synthetic)",
        duration_s=184.5,
        launches=(entry("baseline", "launch_0", **result),),
    )


def run(verdict: Verdict, phases: tuple[PhaseRecord, ...], **fields: object) -> RunRecord:
    base: dict[str, object] = {
        "tool_version": "0.1.0",
        "run_id": "20261121T010203Z-840303b",
        "profile": "a100x2_pcie4",
        "profile_sha256": digest("profile"),
        "profile_document": {"name": "a100x2_pcie4"},
        "scope": "profile a100x2_pcie4: 2xA100 80GB PCIe Gen4, throughput gated",
        "verdict": verdict,
        "reasons": ("all 4 required checks passed",),
        "started_at": "2026-11-21T01:02:03Z",
        "finished_at": "2026-11-21T02:15:00Z",
        "command": "runbook run --phase all --profile a100x2_pcie4",
        "environment": {
            "git.branch": "main",
            "git.sha": "840303b8eaea7221e93fab53d52ba352ba68817a",
            "git.dirty": "False",
            "torch.version": "2.13.0",
            "gpu.names": "NVIDIA A100 80GB PCIe, NVIDIA A100 80GB PCIe",
            "memory.total_gib": "503.5406 GiB",
        },
        "required": REQUIRED,
        "phases": phases,
        "exports": {"NSA_PREFILL_BATCHED": "1", "NSA_DDP_BUCKET_MB": "50"},
        "artifacts": tuple(
            ArtifactRecord(path=path, sha256=digest(path), size_bytes=1000 + index)
            for index, path in enumerate(("git_sha.txt", "baseline/launch_0/training.csv"))
        ),
    }
    return RunRecord.model_validate(base | fields)


def go() -> RunRecord:
    """Every required check passes; one optional one is skipped."""
    good = throughput(47.25, Outcome.PASS, Reason.OK, "the bound 45.8 is above the floor")
    return run(Verdict.GO, (preflight(), baseline(good), sweep(), long_run()))


def no_go() -> RunRecord:
    """Throughput is under the floor, and the sweep is undecided."""
    bad = throughput(23.0, Outcome.FAIL, Reason.BELOW_LIMIT, "23 tok/s is below 39")
    return run(
        Verdict.NO_GO,
        (preflight(), baseline(bad), sweep(Outcome.INCONCLUSIVE), long_run()),
        reasons=(
            "baseline.throughput: 23 tok/s is below 39",
            "bucket_sweep.best: only 2 of 6 rounds are valid",
            "one warning: sequential prefill at S=2048",
        ),
        settings={"NSA_PREFILL_BATCHED": "0"},
        caveats=("settings changed (NSA_PREFILL_BATCHED=0)",),
    )


def incomplete() -> RunRecord:
    """Stopped by hand while the baseline hung; the sweep and the long run left no row at all."""
    cut = _held(
        Outcome.INCOMPLETE,
        Reason.INTERRUPTED,
        reason="stopped by hand at step 12 of 100",
        evidence=("baseline/launch_0/console.log",),
        remedy="run the phase again and let it end",
        rerun=RERUN.format("baseline"),
    )
    hung = baseline(
        cut,
        status=LaunchStatus.INTERRUPTED,
        exit_code=130,
        cause="stopped by hand; no step for 41 s before",
        culprit_rank=1,
    )
    return run(
        Verdict.INCOMPLETE,
        (preflight(), hung),
        reasons=("interrupted during baseline",),
        interrupted=True,
        exports={},
        artifacts=(),
    )


SAMPLES = {"go": go, "no_go": no_go, "incomplete": incomplete}
