"""Evidence made by hand, written as the files that it would have been read from."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from nsa import contract
from runbook.records.evidence import LaunchEvidence
from tests.factory.files import write_beats
from tests.factory.ranks import records


def write_launch(root: Path, made: LaunchEvidence) -> Path:
    """A run directory from which the same evidence is read; returns it."""
    folder = root / made.launch.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    own = zlib.crc32(made.launch.run_dir.encode()) % 1_000_000  # no two launches leave one file
    if made.training is not None:
        table = made.training.frame.assign(
            warmup=made.training.frame["warmup"].astype(int), launch=own
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
