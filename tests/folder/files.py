"""Small run directories written from the contract, for the readers' tests."""

from __future__ import annotations

import json
import random

HEADER = "step,loss,lr,toks_per_s,tokens,dt_s,grad_norm,mem_mib,arm,block,warmup,fetch_s,host_s"


def row(step: int, *, dt_s: float = 0.125, arm: str = "", block: int = 0, warmup: int = 0) -> str:
    """One row as the trainer writes it: 512 tokens per step."""
    rate = 512 / dt_s
    return (
        f"{step},5.5{step:03d},0.001,{rate!r},512,{dt_s!r},1.25,300.5,"
        f"{arm},{block},{warmup},0.0001,0.0002"
    )


def training(rows: int, *, seed: int = 1) -> str:
    """A healthy training.csv with a slow first step."""
    source = random.Random(seed)
    lines = [HEADER, row(1, dt_s=0.5)]
    lines += [row(step, dt_s=0.125 + source.random() / 64) for step in range(2, rows + 1)]
    return "\n".join(lines) + "\n"


def legacy(rows: int, *, every: int = 20) -> str:
    """The older form: no header, one row per `every` steps, beginning with step 1."""
    steps = [1, *range(every, rows * every, every)][:rows]
    return "".join(f"{step},5.6,3e-04,{400 + step}\n" for step in steps)


def beat(
    event: str, *, rank: int = 0, token: str = "ab12", mono: float = 1.0, **fields: object
) -> str:
    """One heartbeat line."""
    record = {"event": event, "ts": 1.7e9 + mono, "mono": mono, "rank": rank, "pid": 42}
    record |= {"token": token, "step": 0, "phase": "step", "rss_mib": 300.0, "cuda_mib": None}
    return json.dumps(record | fields) + "\n"


def heartbeats(steps: int, *, rank: int = 0, token: str = "ab12") -> str:
    """A healthy rank from boot to exit."""
    text = beat("boot", rank=rank, token=token, phase="init")
    for step in range(1, steps + 1):
        common = {"rank": rank, "token": token, "step": step, "mono": 1.0 + step}
        text += beat("step_start", **common)  # type: ignore[arg-type]
        text += beat("progress", loss=5.5, gate_entropy=0.9, max_gate=0.4, **common)  # type: ignore[arg-type]
        text += beat("step_end", rss_mib=300.0 + step, **common)  # type: ignore[arg-type]
    end = {"rank": rank, "token": token, "mono": 2.0 + steps, "phase": "exit"}
    return text + beat("exit", code=0, reason="done", steps_done=steps, param_hash="cafe", **end)  # type: ignore[arg-type]
