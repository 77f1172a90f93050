"""Run directories made by hand: one healthy, one in the older form."""

from __future__ import annotations

import json
import math
from pathlib import Path

from nsa.contract.digests import recomputed_steps, watched_steps
from runbook.accounts.workload import GeneratedData
from tests.accounts.first_weights import first_weights
from tests.factory import files
from tests.factory.told import PROOF, in_force, shadow

TOKEN, SEED = "a1b2", 1
# The model of configs/cpu_smoke.yaml.
SHAPE = {
    "model": {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 32, "d_v": 32}
    | {"mlp_ratio": 8 / 3, "tie_embeddings": True},
    "nsa": {"l": 16, "phi": "avg"},
}


def loss_of(step: int) -> float:
    return 5.6 + 0.001 * (step % 7)


def dt_of(step: int) -> float:
    return 0.05 + 0.001 * math.sin(step)


def row(
    step: int,
    *,
    loss: float | None = None,
    dt_s: float | None = None,
    arm: str = "",
    block: int = 0,
    tokens: int = 512,
) -> str:
    """A row of a healthy run; `beats` tells the same of it."""
    dt_s = dt_of(step) if dt_s is None else dt_s
    loss = loss_of(step) if loss is None else loss
    rest = {"tokens": tokens, "grad_norm": 1.0, "mem_mib": 300, "fetch_s": 0.001, "host_s": 0.001}
    return files.row(step, loss=loss, dt_s=dt_s, arm=arm, block=block, **rest)


def healthy(folder: Path, *, steps: int = 120, ranks: int = 2) -> Path:
    """A directory as the trainer leaves it after a good run."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_rows(folder, [files.HEADER, *map(row, range(1, steps + 1))])
    for rank in range(ranks):
        files.write_beats(folder, rank, beats(rank, steps, ranks=ranks))
    write_env(folder, world_size=ranks, steps=steps)
    return folder


def write_env(
    folder: Path, *, world_size: int = 2, floor: float | None = math.log(256), steps: int = 120
) -> None:
    effective = {
        "loss_floor": floor,
        "loss_floor_source": "ln(vocab_size)",
        "seq_len": 128,
        "per_rank_batch": 4 // world_size,
        "accumulation": 1,
        "dtype": "fp32",
        "device": "cpu",
        "dataset": "synthetic",
        "vocab_size": 256,
        "steps": steps,
        "schedule_steps": 1000,
        "n_params": 462_232,
    }
    train = {"lr": 0.001, "warmup_steps": 0, "lr_schedule": "constant", "grad_clip": 1.0}
    train["seed"] = SEED
    document = {"run_token": TOKEN, "world_size": world_size, "effective": effective}
    document |= {"config": {"train": train, **SHAPE}}
    (folder / "env.json").write_text(json.dumps(document))


def beats(rank: int, steps: int, *, token: str = TOKEN, ranks: int = 2) -> list[dict[str, object]]:
    """What a rank says during a good run, two lines for each step."""
    base = {"rank": rank, "pid": 100 + rank, "token": token}
    spots = ("embedding", "attention", "gates", "layer", "logits")
    spots += ("blocks_illegal", "blocks_shortfall")
    proof = {
        "loss": loss_of(1),
        "loss_again": loss_of(1),
        **PROOF,
        "norm_told": 1.0,
        "norm_before": 1.0,
        "positions": 512 // ranks,
        "own_gradient": {"embedding": 0.1},
        "wire": "fp32",
        "mean_low": 1.0,
        "oracle": {
            **dict.fromkeys(spots, 0.0),
            "shape": {**SHAPE["model"], **SHAPE["nsa"]},
            "layers": 2,
            "seams": 0,
        },
        "weights": first_weights({"config": SHAPE, "effective": {"vocab_size": 256}}),
    }
    lines: list[dict[str, object]] = [
        {"event": "proof", "step": 0, "ts": 1000, "mono": 5.0, **proof}
    ]
    data = GeneratedData(
        kind="synthetic",
        seed=SEED,
        vocab_size=256,
        seq_len=128,
        nproc=ranks,
        rows=4 // ranks,
        accumulation=1,
    )
    mono = 5.0
    for step in range(1, steps + 1):
        begun, mono = mono, mono + dt_of(step)
        for event, at in (("step_start", begun + 1e-5), ("fetched", begun + 1.03e-3)):
            lines.append({"event": event, "step": step, "ts": 1000 + at, "mono": at})
        now = {"step": step, "ts": 1000 + mono, "mono": mono}
        said = {"loss": loss_of(step), "toks_per_s": 512 / dt_of(step), "grad_norm": 1.0}
        said["fetch_s"] = 0.001
        told = {"embedded": 512 // ranks, "data": data.of_step(rank, step)}
        told |= {"mem_mib": 300.0, "rss_mib": 300.0}
        lines += [{"event": "progress", **now, **said}, {"event": "step_end", **now, **told}]
    if ranks > 1:
        one = {"bytes": [4 * 462_232], "last_bytes": [131_072]}
        lines.append({**now, "event": "ddp_buckets", **one})
    end = {"event": "exit", "code": 0, "step": steps, "ts": 1001 + mono, "mono": mono + 1.0}
    sums = {"fetched_sum": 7, "embedded_sum": 7, "param_hash": "feed"}
    moved = {"moved": {"embedding": 0.001}, "largest_lr": 0.001, "updates": [steps, steps]}
    moved |= {"first_update": {"moved": 0.001, "lr": 0.001}, "proof": proof}
    moved |= {"shadow": shadow(watched_steps(token, 1, steps))}
    moved |= {"in_force": in_force(ranks, {"OMP_NUM_THREADS": "1"})}
    twice = recomputed_steps(token, 1, steps)
    losses = [loss_of(step) for step in twice]
    moved |= {
        "recomputed": {"steps": list(twice), "losses": losses, "gradient": 1e-6, "ranks": 0.0}
    }
    return [{**base, **line} for line in (*lines, {**end, **sums, **moved})]


def legacy_run(*, last: int = 200, every: int = 20, first_rate: float = 620.0) -> list[str]:
    """Rows of one run in the older form: step 1, then one row per `every` steps."""
    steps = [1, *range(every, last + 1, every)] if every > 1 else list(range(1, last + 1))
    return [f"{s},{loss_of(s)},0.0001,{first_rate if s == 1 else 850 + s % 7}" for s in steps]
