"""Run directories made by hand: one healthy, one in the older form."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd

from nsa.contract.digests import recomputed_steps
from tests.accounts.first_weights import first_weights
from tests.factory import files
from tests.factory.ranks import honest, records
from tests.factory.told import DATA, ORACLE, first_pass, in_force, recomputed, told_steps

TOKEN = "a1b2"
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


def row(step: int, **told: object) -> str:
    """A row of a healthy run; `beats` tells the same of it."""
    usual = {"loss": loss_of(step), "dt_s": dt_of(step), "grad_norm": 1.0, "mem_mib": 300}
    return files.row(step, **({**usual, "fetch_s": 0.001} | told))


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
    train["seed"] = DATA.seed
    document = {"run_token": TOKEN, "world_size": world_size, "effective": effective}
    document |= {"config": {"train": train, **SHAPE}}
    (folder / "env.json").write_text(json.dumps(document))


def beats(rank: int, steps: int, *, token: str = TOKEN, ranks: int = 2) -> list[files.Record]:
    """What a rank says during a good run."""
    at = range(1, steps + 1)
    table = pd.DataFrame({"step": at, "loss": map(loss_of, at), "dt_s": map(dt_of, at)})
    table = table.assign(toks_per_s=512 / table["dt_s"], grad_norm=1.0, fetch_s=0.001)
    data = replace(DATA, nproc=ranks, rows=4 // ranks)
    told = told_steps(
        table,
        began=5.0 + 1e-5 * rank,
        data=[data.of_step(rank, step) for step in at],
        embedded=512 // ranks,
        mem_mib=300.0,
        rss_mib=300.0,
    )
    proof = first_pass(
        loss_of(1),
        positions=512 // ranks,
        own_gradient={"embedding": 0.1},
        wire="fp32",
        oracle={**ORACLE, "shape": {**SHAPE["model"], **SHAPE["nsa"]}, "layers": 2},
        weights=first_weights({"config": SHAPE, "effective": {"vocab_size": 256}}),
    )
    whole = {"bytes": [4 * 462_232], "last_bytes": [131_072]}
    return records(
        honest(
            rank,
            table,
            told,
            token=token,
            proof=proof,
            moved={"embedding": 0.001},
            rate=0.001,
            twice=recomputed(recomputed_steps(token, 1, steps), table, layers=2),
            ending={"in_force": in_force(ranks, {"OMP_NUM_THREADS": "1"})},
            ddp_buckets=(whole,) if ranks > 1 else (),
        )
    )


def legacy_run(*, every: int = 20, first_rate: float = 620.0) -> list[str]:
    """Rows of one run in the older form: step 1, then one row per `every` steps."""
    steps = [1, *range(every, 201, every)] if every > 1 else list(range(1, 201))
    return [f"{s},{loss_of(s)},0.0001,{first_rate if s == 1 else 850 + s % 7}" for s in steps]
