"""Ranks started by `torch.multiprocessing`, without torchrun; each tells in a file that it lives.

python spawned.py --ranks 2 --steps 60 --out out
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, ranks: int, steps: int, out: Path, port: int) -> None:
    """One rank: rank 0 writes log.jsonl, each its own alive_RANK.jsonl."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw, goal = torch.Generator().manual_seed(rank), torch.randn(512, 512) / 512**0.5
    with (out / "log.jsonl").open("a") as log, (out / f"alive_{rank}.jsonl").open("a") as alive:
        for step in range(1, steps + 1):
            inputs = torch.randn(256, 512, generator=draw)
            loss = nn.functional.mse_loss(model(inputs), inputs @ goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(json.dumps({"at": step}), file=alive, flush=True)
            if rank == 0:
                row = {"iteration": step, "train/loss": loss.item(), "lr": 0.1}
                print(json.dumps(row), file=log, flush=True)
    dist.destroy_process_group()
    # torch's threads may abort the process when the interpreter ends (docs/your-trainer.md).
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, (args.ranks, args.steps, args.out, port), nprocs=args.ranks)
