"""Plain PyTorch under DistributedDataParallel: prints a line for each step on rank 0.

torchrun --nproc_per_node=2 plain_ddp.py --steps 60
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=8)
args = parser.parse_args()

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
teacher = torch.randn(64, 10)
draw = torch.Generator().manual_seed(rank)
print("ready to train", flush=True)
for step in range(1, args.steps + 1):
    began = time.perf_counter()
    time.sleep(0.02)  # stands for a model that takes a while
    inputs = torch.randn(args.batch, 64, generator=draw)
    loss = nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    milliseconds = 1000 * (time.perf_counter() - began)
    if rank == 0:
        print(f"step {step:4d} | loss {loss.item():.4f} | {milliseconds:.2f} ms", flush=True)
dist.destroy_process_group()
sys.stdout.flush()
# torch's threads may abort the process when the interpreter ends (docs/your-trainer.md).
os._exit(0)
