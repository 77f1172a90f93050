"""A tiny GPT-2 trained by `transformers.Trainer`, as it prints its own log.

torchrun --nproc_per_node=2 hf.py --max_steps 60 --output_dir out
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

LENGTH, WORDS = 32, 64


class Counting(Dataset):
    """Sequences that count on from a random word, which can be learned."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + index * 7) % WORDS
        return {"input_ids": ids, "labels": ids}


@dataclass
class Wanted:
    """What the command line says, in the names of `TrainingArguments`."""

    max_steps: int = field(default=60)
    output_dir: str = field(default="out")


(wanted,) = HfArgumentParser(Wanted).parse_args_into_dataclasses()
config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
arguments = TrainingArguments(
    output_dir=wanted.output_dir,
    max_steps=wanted.max_steps,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
Trainer(
    model=GPT2LMHeadModel(config),
    args=arguments,
    train_dataset=Counting(),
    data_collator=default_data_collator,
).train()
sys.stdout.flush()
# torch's threads may abort the process when the interpreter ends (docs/your-trainer.md).
os._exit(0)
