"""Run folders made by hand, with launches that can be read again."""

from __future__ import annotations

import json
from pathlib import Path

from runbook.folder.manifest import write_manifest
from runbook.records import (
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Outcome,
    Reason,
    RunRecord,
    Verdict,
)
from tests.factory import records
from tests.factory.files import HEADER, write_beats, write_rows
from tests.reports.samples import run, throughput
from tests.tools.inspect.folders import beats, row

ENV = {
    "run_token": "a1b2",
    "started_at": "2026-11-21T01:02:03Z",
    "git": {"branch": "main", "sha": "840303b", "dirty": False, "diff_sha256": ""},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "world_size": 2,
    "device": {"type": "cpu", "name": "cpu", "count": 0},
    "config_sha256": "c" * 64,
    "effective": {
        "seq_len": 2048,
        "global_batch": 2,
        "accumulation": 1,
        "dtype": "bf16",
        "attention_path": "batched",
    },
    "toggles": [{"name": "NSA_DDP_BUCKET_MB", "value": "50", "default": "25", "source": "env"}],
}


def make_run(
    folder: Path,
    *,
    run_id: str,
    dts: list[float],
    env: dict[str, object] | None = None,
    outcome: Outcome = Outcome.PASS,
    **fields: object,
) -> RunRecord:
    """A run with one baseline launch for each step time, written to `folder`."""
    entries = []
    for index, dt_s in enumerate(dts):
        name = f"run{index}"
        home = folder / "baseline" / name
        home.mkdir(parents=True)
        write_rows(home, [HEADER, *(row(step, dt_s=dt_s) for step in range(1, 61))])
        (home / "env.json").write_text(json.dumps(ENV | (env or {})))
        write_beats(home, 0, beats(0, 60))
        result = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token="a1b2")
        entries.append(
            LaunchEntry(launch=records.launch("torchrun", name=name, steps=60), result=result)
        )
    code = Reason.OK if outcome is Outcome.PASS else Reason.BELOW_LIMIT
    check = throughput(512 / dts[0], outcome, code, "measured")
    phase = records.phase("baseline", check, launches=tuple(entries))
    verdict = Verdict.GO if outcome is Outcome.PASS else Verdict.NO_GO
    required = {"required": ("baseline.throughput",), "run_id": run_id}
    record = run(verdict, (phase,), **(required | fields))
    (folder / "run.json").write_text(record.model_dump_json())
    write_manifest(folder)
    return record
