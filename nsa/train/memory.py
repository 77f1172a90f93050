"""Snapshots of memory use, as the seeds ask for them."""

from __future__ import annotations

from pathlib import Path

import torch

from nsa.contract import Event, memory_file
from nsa.train.files import write_json
from nsa.train.heartbeat import MIB, Heartbeat


def write_snapshot(run_dir: Path, heartbeat: Heartbeat, *, when: str, step: int) -> None:
    """Write `mem_{pre,post}_step{N}_rank{r}.json` and say so in the heartbeat."""
    facts: dict[str, object] = {"step": step, "when": when, "rss_mib": heartbeat.memory.mib()}
    if heartbeat.cuda_mib is not None:
        facts["cuda_allocated_mib"] = torch.cuda.memory_allocated() / MIB
        facts["cuda_reserved_mib"] = torch.cuda.memory_reserved() / MIB
        facts["cuda_peak_mib"] = torch.cuda.max_memory_allocated() / MIB
        facts["cuda_stats"] = dict(torch.cuda.memory_stats())
    path = run_dir / memory_file(when=when, step=step, rank=heartbeat.rank)
    write_json(path, facts)
    heartbeat.write(Event.MEMORY_DUMP, path=path.name)
