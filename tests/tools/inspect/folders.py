"""Run directories made by hand: one healthy, one in the older form."""

from __future__ import annotations

import json
import math
from pathlib import Path

HEADER = "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s,host_s"
TOKEN = "a1b2"


def row(step: int, *, loss: float = 5.6, dt_s: float = 0.05, arm: str = "", block: int = 0) -> str:
    rate = 512 / dt_s
    return f"{step},{loss},0.001,{rate:.3f},512,{dt_s},1.0,300,{arm},{block},0,0.001,0.001"


def healthy(folder: Path, *, steps: int = 120, ranks: int = 2) -> Path:
    """A directory as the trainer leaves it after a good run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(step, dt_s=0.05 + 0.001 * math.sin(step)) for step in range(1, steps + 1)]
    write_rows(folder, [HEADER, *rows])
    for rank in range(ranks):
        write_beats(folder, rank, beats(rank, steps))
    write_env(folder, world_size=ranks)
    return folder


def write_env(folder: Path, *, world_size: int = 2, floor: float | None = math.log(256)) -> None:
    effective = {"loss_floor": floor, "loss_floor_source": "ln(vocab_size)"}
    document = {"run_token": TOKEN, "world_size": world_size, "effective": effective}
    (folder / "env.json").write_text(json.dumps(document))


def write_rows(folder: Path, lines: list[str]) -> None:
    (folder / "training.csv").write_text("".join(f"{line}\n" for line in lines))


def beats(rank: int, steps: int, *, token: str = TOKEN) -> list[dict[str, object]]:
    base = {"rank": rank, "pid": 100 + rank, "token": token}
    lines: list[dict[str, object]] = [
        {**base, "event": "step_end", "step": step, "ts": 1000 + step, "mono": 5.0 + step}
        for step in range(1, steps + 1)
    ]
    end = {"event": "exit", "code": 0, "step": steps, "ts": 1001 + steps, "mono": 6.0 + steps}
    return [*lines, {**base, **end}]


def write_beats(folder: Path, rank: int, lines: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"heartbeat_rank{rank}.jsonl").write_text(text)


def legacy_run(*, last: int = 200, every: int = 20, first_rate: float = 620.0) -> list[str]:
    """Rows of one run in the older form: step 1, then one row per `every` steps."""
    steps = [1, *range(every, last + 1, every)] if every > 1 else list(range(1, last + 1))
    return [f"{s},5.6,0.0001,{first_rate if s == 1 else 850 + s % 7}" for s in steps]
