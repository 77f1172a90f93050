"""Evidence made by hand, written as the files that it would have been read from."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from nsa import contract
from nsa.contract import Event
from runbook.records.evidence import LaunchEvidence, RankLog
from tests.factory.files import write_beats
from tests.phases import heartbeats

Record = dict[str, Any]


def write_launch(root: Path, made: LaunchEvidence) -> Path:
    """A run directory from which the same evidence is read; returns it."""
    folder = root / made.launch.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    own = zlib.crc32(made.launch.run_dir.encode()) % 1_000_000  # no two launches leave one file
    if made.training is not None:
        table = made.training.frame.assign(
            warmup=made.training.frame["warmup"].astype(int), host_s=own / 1e9
        )
        table.to_csv(folder / contract.TRAINING_CSV, index=False)
    if made.gates is not None:
        made.gates.to_csv(folder / contract.GATES_CSV, index=False)
    for name, document in (
        (contract.ENV_JSON, made.env),
        (contract.SDPA_AUDIT_JSON, made.audit),
        (contract.PROFILE_JSON, made.profile),
        (contract.CEILINGS_JSON, made.ceilings),
        ("devices_before.json", made.devices_before),
        ("devices_after.json", made.devices_after),
        ("kernel_log.json", made.kernel_log),
        ("load.json", made.load),
        ("checkout.json", made.checkout),
        ("result.json", made.result.model_dump(mode="json")),
    ):
        if document is not None:
            (folder / name).write_text(json.dumps(document))
    for rank in made.ranks:
        lines = [{**line, "ts": float(line["ts"]) + own} for line in records(rank)]
        write_beats(folder, rank.rank, lines)
    (folder / "console.log").write_text("".join(f"{line}\n" for line in made.console_lines))
    return folder


def records(log: RankLog) -> list[Record]:
    """The heartbeats from which this log is read."""
    pid = log.pids[0] if log.pids else None
    head = {"rank": log.rank, "pid": pid, "token": next(iter(log.tokens), heartbeats.TOKEN)}
    head |= {"rss_mib": 300.0, "cuda_mib": None}
    first = float(log.steps["mono"].iloc[0]) - 0.01
    made: list[Record] = [{**head, "event": Event.BOOT, "step": 0, "mono": first, "ts": first}]
    if log.proof is not None:
        made.append({**made[0], "event": Event.PROOF, **log.proof})
    made += [
        {**made[0], "event": Event.EFFECT, **_effect(effect)} for effect in log.effects
    ]  # fmt: skip
    made += [{**made[0], "event": Event.DDP_BUCKETS, **sizes} for sizes in log.ddp_buckets]
    made += [{**made[0], "event": Event.CHECKPOINT, **saved} for saved in log.checkpoints]
    begun = first
    for row in log.steps.to_dict("records"):
        now = {**head, "step": int(row["step"]), "mono": row["mono"], "ts": row["mono"]}
        said = {name: row[name] for name in ("loss", "toks_per_s", "fetch_s")}
        names = ("embedded", "data", "mem_mib", "reserved_mib", "cpu_s")
        told = {name: row[name] for name in names}
        made += [
            {**now, "event": Event.STEP_START, "mono": begun},
            {**now, "event": Event.FETCHED, "mono": begun + row["fetch_clock_s"]},
            {**now, "event": Event.PROGRESS, **said},
            {**now, "event": Event.STEP_END, **told},
        ]
        begun = row["mono"]
    end = {"code": log.exit_code, "reason": log.exit_reason, "param_hash": log.param_hash}
    return [*made, {**made[-1], "event": Event.EXIT, **end, **log.ending}]


def _effect(effect: Any) -> Record:
    names = ("toggle", "value", "took_effect", "evidence", "arm", "block")
    return {name: getattr(effect, name) for name in names}
