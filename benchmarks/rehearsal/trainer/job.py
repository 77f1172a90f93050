"""A launch as the trainer itself reads it: from its command line, its variables and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsa.config import parameter_count
from nsa.launch.asked import Block
from nsa.launch.plan import plan_launch


def bucket_mib(block: Block) -> float:
    """The cap of DDP's buckets."""
    return block.toggles.number("NSA_DDP_BUCKET_MB")


def wire(block: Block) -> str:
    """What gradients travel as."""
    return "fp32" if block.toggles.text("NSA_DDP_COMPRESS") == "off" else "bf16"


class Job:
    """What a launch was asked for. plan: the trainer's own, of rank 0.

    where: the launch's folder in the run. blocks: those that can run; refused: the others. Flash
    kernels take no mask, so where only they are allowed, masked attention is refused.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], where: str) -> None:
        self.where, self.ranks = where, ranks_of(argv)
        words = argv[list(argv).index("nsa.train") + 1 :]
        torchrun = {"WORLD_SIZE": str(self.ranks), "MASTER_PORT": "29500"}
        self.plan = plan_launch(words, {**env, **torchrun})
        self.train, self.model = self.plan.config.train, self.plan.model_config()
        self.dataset = self.plan.config.data.dataset
        self.token = str(self.plan.run_token)
        self.parameters = parameter_count(self.model)
        self.blocks: list[Block] = []
        self.refused: list[Block] = []
        for block in self.plan.blocks:
            flash_only = block.toggles.flag("NSA_SDPA_FLASH_ONLY")
            (self.refused if flash_only else self.blocks).append(block)

    def evaluates(self, step: int) -> bool:
        """Is there an evaluation after this step?"""
        return self.train.eval_every > 0 and step > 0 and step % self.train.eval_every == 0

    @property
    def gradient_mib(self) -> float:
        """Of all parameters, as float32."""
        return self.parameters * 4 / 2**20

    @property
    def rank_tokens(self) -> int:
        """Of a rank in a step."""
        return self.plan.tokens_per_step // self.ranks


def ranks_of(argv: Sequence[str]) -> int:
    """How many processes torchrun is told to start; 1 without it."""
    return next((int(word.partition("=")[2]) for word in argv if "nproc" in word), 1)
