"""A small network trained by `lightning.Trainer`, which writes metrics.csv by its own logger.

torchrun --nproc_per_node=2 lit.py --max_steps 60 --output_dir out
"""

from __future__ import annotations

import argparse
import os
import sys

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--max_steps", type=int, default=60)
parser.add_argument("--output_dir", default="out")
args = parser.parse_args()


class Net(lightning.LightningModule):
    """Two layers that learn what a random matrix says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0)
inputs = torch.randn(8192, 64)
labels = (inputs @ torch.randn(64, 10)).argmax(1)
lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy="ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "auto",
    max_steps=args.max_steps,
    logger=CSVLogger(args.output_dir, flush_logs_every_n_steps=1),
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_checkpointing=False,
    enable_model_summary=False,
).fit(Net(), DataLoader(TensorDataset(inputs, labels), batch_size=8))
sys.stdout.flush()
# torch's threads may abort the process when the interpreter ends (docs/your-trainer.md).
os._exit(0)
