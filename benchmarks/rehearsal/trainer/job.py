"""A launch as the trainer reads it: from its command line, its variables and its config file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rehearsal.roofline import Shape
from benchmarks.rehearsal.trainer.steps import Block, Job

# The byte tokenizer's symbols.
VOCABULARY = 256
MLP_RATIO = 8 / 3
# What a config file may leave out of the model.
_DEFAULTS: Mapping[str, Any] = {"mlp_ratio": MLP_RATIO, "tie_embeddings": True}


def read_job(argv: Sequence[str], env: Mapping[str, str], where: str) -> tuple[Job, dict[str, Any]]:
    """The job, and the config in force with what the command line changes in it."""
    config = yaml.safe_load(Path(_option(argv, "--config")).read_text(encoding="utf-8"))
    config["model"] = {**_DEFAULTS, **config["model"]}
    file_steps = int(config["train"]["steps"])
    steps = int(_option(argv, "--steps"))
    config["train"]["steps"] = steps
    config.setdefault("data", {})["dataset"] = _option(argv, "--dataset")
    ddp = _option(argv, "--ddp") == "1"
    ranks = next((int(word.partition("=")[2]) for word in argv if "nproc" in word), 1)
    train, arms = config["train"], _option(argv, "--arms")
    one = Block(arm="", index=0, warmup=0, steps=steps, settings=env)
    blocks = _blocks(json.loads(Path(arms).read_text()), env) if arms else (one,)
    job = Job(
        where=where,
        shape=_shape(config),
        config=config,
        ranks=ranks,
        global_batch=int(train["batch_size"]),
        accumulation=int(train["accumulate_grad_batches"]),
        # DDP switches it off, unless told not to.
        recompute=bool(config["runtime"]["gradient_checkpointing"]) and not ddp,
        dataset=config["data"]["dataset"],
        blocks=tuple(block for block in blocks if not _no_kernel(block)),
        refused=tuple(block for block in blocks if _no_kernel(block)),
        learning_rate=float(train["lr"]),
        ramp=int(train["warmup_steps"]),
        schedule_steps=max(file_steps, steps),
        seed=train["seed"],
        eval_batches=train.setdefault("eval_batches", 4),
        eval_every=int(train.get("eval_every") or 0),
        profiled=int(_option(argv, "--profile-steps") or 0),
        ddp=ddp,
    )
    return job, config


def _no_kernel(block: Block) -> bool:
    """Flash kernels take no mask, so torch refuses masked attention where only they are allowed."""
    return block.settings.get("NSA_SDPA_FLASH_ONLY") == "1"


def _option(argv: Sequence[str], name: str) -> str:
    return next((argv[at + 1] for at, word in enumerate(argv[:-1]) if word == name), "")


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


def _shape(config: Mapping[str, Any]) -> Shape:
    model, nsa, train = config["model"], config["nsa"], config["train"]
    return Shape(
        dim=model["dim"],
        layers=model["n_layers"],
        heads=model["n_heads"],
        groups=model["n_kv_groups"],
        width=model["d_k"],
        hidden=round(MLP_RATIO * model["dim"]),
        vocabulary=VOCABULARY,
        seq_len=train["seq_len"],
        block=nsa["l"],
        stride=nsa["d"],
        selected_block=nsa["l_sel"],
        selected=nsa["n_sel"],
        window=nsa["w"],
    )
