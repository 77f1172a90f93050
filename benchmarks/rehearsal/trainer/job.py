"""A launch as the trainer reads it: from its command line, its variables and its config file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# The byte tokenizer's symbols.
VOCABULARY = 256
# What a config file may leave out of the model.
_DEFAULTS: Mapping[str, Any] = {"mlp_ratio": 8 / 3, "tie_embeddings": True}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stretch of steps under one set of settings; a plain run is one without a name."""

    arm: str
    index: int
    warmup: int
    steps: int
    settings: Mapping[str, str]

    @property
    def bucket_mib(self) -> float:
        """The cap of DDP's buckets."""
        return float(self.settings.get("NSA_DDP_BUCKET_MB", "25"))

    @property
    def wire(self) -> str:
        """What gradients travel as."""
        return "fp32" if self.settings.get("NSA_DDP_COMPRESS", "off") == "off" else "bf16"

    @property
    def has_kernels(self) -> bool:
        """Flash kernels take no mask: where only they are allowed, masked attention is refused."""
        return self.settings.get("NSA_SDPA_FLASH_ONLY") != "1"


class Shape:
    """The trained model, from its config file, and what follows from its sizes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        model, nsa = config["model"], config["nsa"]
        self.seq_len: int = config["train"]["seq_len"]
        self.dim, self.layers, self.heads = model["dim"], model["n_layers"], model["n_heads"]
        self.groups, self.width = model["n_kv_groups"], model["d_k"]
        self.hidden = round(model["mlp_ratio"] * self.dim)
        self.block, self.stride = nsa["l"], nsa["d"]
        self.selected_block, self.selected, self.window = nsa["l_sel"], nsa["n_sel"], nsa["w"]

    def blocks_read(self, most: int) -> float:
        """Blocks that a query attends to, on average, where it may attend to so many."""
        own = (min(most, at // self.selected_block + 1) for at in range(self.seq_len))
        return sum(own) / self.seq_len

    @property
    def parameters(self) -> int:
        """Distinct parameters; input and output embedding are one."""
        queries_and_out = 2 * self.dim * self.heads * self.width
        keys_and_values = 2 * 3 * self.dim * self.groups * self.width
        gates = 3 * self.heads * (self.dim + 1)
        layer = queries_and_out + keys_and_values + gates + 3 * self.dim * self.hidden
        norms = 2 * self.dim
        return int(self.layers * (layer + norms) + self.dim + VOCABULARY * self.dim)

    @property
    def gradient_mib(self) -> float:
        """Of all parameters, as float32."""
        return self.parameters * 4 / 2**20

    @property
    def attended(self) -> float:
        """Mean keys for each query: compressed, selected and window, as the paper counts them."""
        total = 0
        for position in range(1, self.seq_len + 1):
            total += max(0, (position - self.block) // self.stride + 1)
            whole_blocks = min((position - 1) // self.selected_block, self.selected - 1)
            total += whole_blocks * self.selected_block + (position - 1) % self.selected_block + 1
            total += min(self.window, position)
        return total / self.seq_len

    @property
    def model_flops_per_token(self) -> float:
        """What the model needs: 6 x parameters, and three times the attention's forward pass."""
        scores = 4 * self.heads * self.width * self.attended
        return 6.0 * self.parameters + 3.0 * self.layers * scores

    @property
    def masked_flops_per_token(self) -> float:
        """What the device does for attention: a masked kernel computes what is hidden, too.

        The selected branch over the whole sequence, the window over twice its width, the
        compressed branch over all blocks; backward is 2.5 forward passes.
        """
        keys = self.seq_len + 2 * self.window + self.seq_len // self.stride
        return 3.5 * self.layers * 4 * self.heads * self.width * keys


class Job:
    """What a launch was asked for. config: the file's, with what the command line changes in it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], where: str) -> None:
        def option(name: str) -> str:
            return next((argv[at + 1] for at, word in enumerate(argv[:-1]) if word == name), "")

        self.where = where
        self.config = yaml.safe_load(Path(option("--config")).read_text(encoding="utf-8"))
        train = self.config["train"]
        train.setdefault("eval_batches", 4)
        self.config["model"] = {**_DEFAULTS, **self.config["model"]}
        self.dataset = self.config.setdefault("data", {})["dataset"] = option("--dataset")
        steps = int(option("--steps"))
        self.schedule_steps = max(train["steps"], steps)
        train["steps"] = steps
        self.shape = Shape(self.config)
        self.ddp = option("--ddp") == "1"
        self.ranks = ranks_of(argv)
        self.accumulation: int = train["accumulate_grad_batches"]
        # Sequences of a rank in a micro-batch.
        self.per_rank: int = train["batch_size"] // self.ranks
        # DDP switches it off, unless told not to.
        self.recompute = bool(self.config["runtime"]["gradient_checkpointing"]) and not self.ddp
        self.profiled = int(option("--profile-steps") or 0)
        self.eval_every = int(train.get("eval_every") or 0)
        arms = option("--arms")
        plain = Block(arm="", index=0, warmup=0, steps=steps, settings=env)
        blocks = _blocks(json.loads(Path(arms).read_text()), env) if arms else (plain,)
        self.blocks = [block for block in blocks if block.has_kernels]
        self.refused = [block for block in blocks if not block.has_kernels]
        # Of all blocks, those that cannot run included.
        self.last_step = sum(block.warmup + block.steps for block in blocks)

    def evaluates(self, step: int) -> bool:
        """Is there an evaluation after this step?"""
        return bool(self.eval_every) and step > 0 and step % self.eval_every == 0

    @property
    def rank_tokens(self) -> int:
        """Of a rank in a step."""
        return self.per_rank * self.accumulation * self.shape.seq_len

    @property
    def tokens(self) -> int:
        """Of all ranks in a step."""
        return self.ranks * self.rank_tokens


def ranks_of(argv: Sequence[str]) -> int:
    """How many processes torchrun is told to start; 1 without it."""
    return next((int(word.partition("=")[2]) for word in argv if "nproc" in word), 1)


def _blocks(document: Mapping[str, Any], env: Mapping[str, str]) -> tuple[Block, ...]:
    return tuple(
        Block(
            arm=entry["arm"],
            index=entry["block"],
            warmup=document["warmup_steps"],
            steps=entry["steps"],
            settings={**env, **entry["set"]},
        )
        for entry in document["blocks"]
    )
