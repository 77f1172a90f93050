"""One launch on one rank: files, ranks, the measurements in their order, the document, the end."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.ceilings.measure import Bench
from nsa.contract import CEILINGS_JSON, Ceiling, Event, ExitCode, Phase
from nsa.launch.envfile import device_facts
from nsa.launch.output import MIB, Heartbeat, say, write_json
from nsa.launch.plan import Place
from nsa.launch.process import Termination, by_hand, link_latest, new_token, open_run_dir
from nsa.launch.ranks import Ranks, device_of, join_ranks
from nsa.train.session import Ending, run_rank
from nsa.train.settle import End

# The whole program takes seconds, so that a collective of a minute is stuck.
_STUCK = timedelta(minutes=1)
# What a launch by hand writes below, as the trainer does below its `out_dir`.
_OUT_DIR = "artifacts/ceilings"


def run(
    asked: str,
    place: Place,
    termination: Termination,
    *,
    run_dir: Path | None,
    token: str | None,
) -> int:
    """Measure and write; returns the exit code after it was written as the last heartbeat."""
    beat, ending = Heartbeat(rank=place.rank, token=token or ""), Ending()
    grouped = place.from_torchrun and place.world_size > 1

    def measure() -> None:
        _measure_all(asked, place, beat, grouped=grouped, run_dir=run_dir)
        ending.end = End(code=ExitCode.SUCCESS, reason="everything is measured")

    return run_rank(measure, ending, beat, termination, grouped=grouped)


def _measure_all(
    asked: str, place: Place, beat: Heartbeat, *, grouped: bool, run_dir: Path | None
) -> None:
    beat.write(Event.BOOT)
    if run_dir is not None:
        open_run_dir(run_dir, place, beat, grouped=grouped)
    device = device_of(place, asked, asked_by="--device")
    if device.type == "cuda":
        beat.cuda_mib = lambda: round(torch.cuda.memory_allocated() / MIB, 1)
    ranks = join_ranks(place, device, grouped=grouped, timeout=_STUCK)
    if run_dir is None:
        run_dir = _own_dir(ranks, beat)
        open_run_dir(run_dir, place, beat, grouped=grouped)
        if ranks.rank == 0:
            link_latest(run_dir, _OUT_DIR)
    beat.write(Event.INIT_DONE)
    beat.phase = Phase.STEP
    bench = Bench(ranks)
    measured = {}
    for what in Ceiling:
        beat.write(Event.CEILING_START, ceiling=what)
        measured[str(what)] = bench.measure(what)
    everything = _from_all(ranks, {"rank": ranks.rank, "device": _device(device), **measured})
    if ranks.rank == 0:
        _write(run_dir, everything, token=beat.token)
    bench.wait_for_all()
    ranks.end()


def _own_dir(ranks: Ranks, beat: Heartbeat) -> Path:
    beat.token = ranks.from_rank0(new_token())
    return Path(ranks.from_rank0(str(by_hand(_OUT_DIR, beat.token))))


def _device(device: torch.device) -> dict[str, Any]:
    facts = device_facts(device, ranks=1)
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return {"type": facts["type"], "name": facts["name"], "uuid": uuid}


def _from_all(ranks: Ranks, own: dict[str, Any]) -> list[Any]:
    if ranks.world_size == 1:
        return [own]
    everything: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everything, own)
    return everything


def _write(run_dir: Path, everything: list[dict[str, Any]], *, token: str) -> None:
    document = {
        "schema_version": 1,
        "run_token": token,
        "world_size": len(everything),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "ranks": everything,
    }
    write_json(run_dir / CEILINGS_JSON, document)
    for rank in everything:
        say(f"[ceilings] rank {rank['rank']} ({rank['device']['name']}): {_told(rank)}")
    say(f"[run] {run_dir / CEILINGS_JSON}")


def _told(rank: dict[str, Any]) -> str:
    """The rates of a rank in words; of the smallest all-reduce its time."""
    texts = []
    for what in Ceiling:
        one = rank[what]
        name = what.replace("_", " ")
        if one is None:
            texts.append(f"no {name}")
        elif what is Ceiling.LATENCY:
            texts.append(f"{name} {sorted(one['seconds'])[len(one['seconds']) // 2] * 1e6:.0f} us")
        else:
            texts.append(f"{name} {one['rate']:.4g} {one['unit']}")
    return ", ".join(texts)
