"""What one launch will do, decided and checked before torch is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa import torch_env
from nsa.config import ModelConfig, Way
from nsa.config import Path as AttentionPath
from nsa.contract import RUN_DIR_VARIABLE, RUN_TOKEN_VARIABLE, NSAError
from nsa.launch.asked import (
    ArmFile,
    Block,
    Flags,
    load_blocks,
    parse_flags,
    why_no_triton,
    why_not,
)
from nsa.settings import (
    CONFIG_TOGGLES,
    VOCAB_SIZES,
    Loaded,
    Share,
    TrainerConfig,
    TrainSection,
    load_config,
    refusal,
    share_problem,
)
from nsa.toggles import ToggleSet, contradictions, read_values, toggle_set, with_safe_mode

PROFILE_WARMUP_STEPS = 5
# With one of these on, the first step of a block runs under the profiler.
AUDITED = ("NSA_SDPA_AUDIT", "NSA_SDPA_FLASH_ONLY", "NSA_SDPA_NO_FLASH")


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among the ranks, as torchrun's environment tells it."""

    rank: int
    local_rank: int
    world_size: int
    nodes: int
    from_torchrun: bool


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A checked launch. `blocks` cover all its steps; `schedule` is None for a plain run."""

    argv: tuple[str, ...]
    loaded: Loaded
    toggles: ToggleSet
    passed: tuple[torch_env.Passed, ...]
    flags: Flags
    place: Place
    ddp: bool
    blocks: tuple[Block, ...]
    schedule: ArmFile | None
    run_dir: Path | None
    run_token: str | None

    @property
    def config(self) -> TrainerConfig:
        """The effective config."""
        return self.loaded.config

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the launch, warm-up steps of the blocks included."""
        return sum(block.total_steps for block in self.blocks)

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule: the config file's, never shorter than the run.

        The run is all of it: a leg tells by `--run-steps` how long that is.
        """
        return max(self.loaded.schedule_steps, self.flags.run_steps, self.total_steps)

    @property
    def per_rank_batch(self) -> int:
        """Sequences of one rank in one micro-batch."""
        return self.config.train.batch_size // self.place.world_size

    @property
    def micro_batch(self) -> tuple[int, int]:
        """B and S of one rank's micro-batch."""
        return self.per_rank_batch, self.config.train.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks and micro-batches in one optimizer step."""
        train = self.config.train
        return train.batch_size * train.accumulate_grad_batches * train.seq_len

    @property
    def share(self) -> Share:
        """What this rank reads of the data."""
        return Share(
            seq_len=self.config.train.seq_len,
            batch_size=self.per_rank_batch,
            rank=self.place.rank,
            world_size=self.place.world_size,
            seed=self.config.train.seed,
        )

    @property
    def saves(self) -> bool:
        """May the launch write a checkpoint?"""
        return self.flags.save or self.config.train.save_every > 0

    @property
    def checkpointing(self) -> tuple[bool, str]:
        """Is gradient checkpointing in force, and why."""
        if not self.config.runtime.gradient_checkpointing:
            return False, "runtime.gradient_checkpointing is false"
        if self.ddp and self.toggles.flag("NSA_DDP_DISABLE_GC"):
            return False, "off under DDP: NSA_DDP_DISABLE_GC is 1"
        return True, "runtime.gradient_checkpointing is true"

    @property
    def attention_path(self) -> tuple[AttentionPath, str]:
        """How attention runs, and why."""
        if self.toggles.flag("NSA_PREFILL_BATCHED"):
            return "batched", "NSA_PREFILL_BATCHED=1"
        return "sequential", "NSA_PREFILL_BATCHED is not set: token by token"

    def model_config(self) -> ModelConfig:
        """The model's config, every toggle applied."""
        config = self.config
        return ModelConfig(
            vocab_size=VOCAB_SIZES[config.data.tokenizer],
            n_layers=config.model.n_layers,
            attention=config.attention(),
            mlp_ratio=config.model.mlp_ratio,
            tie_embeddings=config.model.tie_embeddings,
            way=Way(
                path=self.attention_path[0],
                selection_ranges="v2" if self.toggles.flag("NSA_SEL_RANGES_V2") else "v1",
                use_flash=config.runtime.use_flash,
            ),
            gradient_checkpointing=self.checkpointing[0],
        )


def read_place(environ: Mapping[str, str]) -> tuple[Place, list[str]]:
    """Rank, world size and nodes from the environment; one process without torchrun."""
    problems = []
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1}
    for name in numbers:
        text = environ.get(name, str(numbers[name]))
        if re.fullmatch(r"[0-9]+", text):
            numbers[name] = int(text)
        else:
            problems.append(f"{name}={text!r}: must be a whole number (torchrun sets it)")
    place = Place(
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=max(1, numbers["WORLD_SIZE"]),
        nodes=max(1, numbers["GROUP_WORLD_SIZE"]),  # torchrun's agents that met, one on each
        from_torchrun="WORLD_SIZE" in environ and "MASTER_PORT" in environ,
    )
    return place, problems


def plan_launch(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchPlan:
    """Check everything that can be checked without torch.

    Raises ConfigError (exit code 2) that lists all problems of the command line, the
    environment, the config and the schedule together.
    """
    flags = parse_flags(argv, environ)
    place, place_problems = read_place(environ)
    values, toggle_problems = read_values(environ)
    problems = [*flags.problems, *place_problems, *toggle_problems]
    given = toggle_set(values, dict.fromkeys(values, "environment"))
    problems += contradictions(given)
    toggles = with_safe_mode(given)
    loaded = _load(flags, toggles, problems)
    ddp = _ddp(flags.ddp, place, problems)
    run_dir, run_token = harness_of(environ, problems)
    if loaded is None:
        raise refusal(problems)
    problems += _relations(loaded.config, place, flags, toggles)
    blocks, schedule = _blocks(flags, toggles, loaded.config, problems)
    uses_nccl = loaded.config.runtime.device != "cpu"
    passed, wrong = torch_env.plan(environ, uses_nccl=uses_nccl)
    problems += wrong
    if problems:
        raise refusal(problems)
    return LaunchPlan(
        argv=tuple(argv),
        loaded=loaded,
        toggles=toggles,
        passed=tuple(passed),
        flags=flags,
        place=place,
        ddp=ddp,
        blocks=tuple(blocks),
        schedule=schedule,
        run_dir=run_dir,
        run_token=run_token,
    )


def _load(flags: Flags, toggles: ToggleSet, problems: list[str]) -> Loaded | None:
    if flags.config is None:
        problems.append(
            "no config: give --config FILE, or CONFIG=FILE in the environment "
            "(for production CONFIG=configs/m7c_125m_2xa100_production.yaml, without a GPU "
            "CONFIG=configs/cpu_smoke.yaml)"
        )
        return None
    by_toggle = {
        key: (toggles.values[name], name)
        for name, key in CONFIG_TOGGLES.items()
        if toggles.is_set(name)
    }
    try:
        changes = {**by_toggle, **flags.overrides}
        return load_config(flags.config, changes, settings=flags.settings)
    except NSAError as error:
        problems += error.problems
        return None


def _ddp(asked: str, place: Place, problems: list[str]) -> bool:
    if asked == "1" and not place.from_torchrun:
        problems.append("--ddp 1 needs torchrun: torchrun --nproc_per_node=N -m nsa.train ...")
    if asked == "0" and place.world_size > 1:
        problems.append(
            f"--ddp 0 under torchrun with {place.world_size} ranks would train "
            f"{place.world_size} separate models: use --ddp 1, or python -m nsa.train"
        )
    return asked == "1" or (asked == "auto" and place.from_torchrun)


def harness_of(environ: Mapping[str, str], problems: list[str]) -> tuple[Path | None, str | None]:
    """The run directory and the token that a harness gave; what is wrong goes to `problems`."""
    folder, token = environ.get(RUN_DIR_VARIABLE), environ.get(RUN_TOKEN_VARIABLE)
    if not folder and not token:
        return None, None
    if not folder or not re.fullmatch(r"[0-9a-fA-F]{8,64}", token or ""):
        problems.append(
            f"{RUN_TOKEN_VARIABLE}={token!r}, {RUN_DIR_VARIABLE}={folder!r}: must be 8 to 64 "
            "hexadecimal digits and a folder, or neither be set"
        )
    return Path(folder or "").resolve(), token


def _relations(config: TrainerConfig, place: Place, flags: Flags, toggles: ToggleSet) -> list[str]:
    problem = share_problem(config.train.batch_size, place.world_size)
    problems = [problem] if problem else []
    if flags.arms:
        given = {"--resume": flags.resume, "--profile-steps": flags.profile_steps}
        problems += [f"--arms and {flag} exclude each other" for flag in given if given[flag]]
    steps, need = config.train.steps, flags.profile_steps + PROFILE_WARMUP_STEPS + 1
    if flags.profile_steps and steps < need:
        problems.append(
            f"--profile-steps {flags.profile_steps} needs at least {need} steps "
            f"({PROFILE_WARMUP_STEPS} before and one after), this launch has {steps}"
        )
    problems += _keeping(config.train)
    if config.data.dataset == "local" and not config.data.local_path:
        problems.append("--dataset local needs --local-path (a file or a folder)")
    device = config.runtime.device
    no_triton = why_no_triton(toggles, config.runtime.use_triton_sel, device)
    problems += [text for text in (no_triton, why_not(toggles, device)) if text is not None]
    return problems


def _keeping(train: TrainSection) -> list[str]:
    """What is said about checkpoints that are kept, and means nothing as it stands."""
    problems = [
        f"train.{key} is for runs that do not keep every checkpoint: set train.keep_last too"
        for key, given in (("keep_every", train.keep_every), ("keep_best", train.keep_best))
        if given and not train.keep_last
    ]
    if train.keep_best and not train.eval_every:
        problems.append("train.keep_best needs evaluations: set train.eval_every")
    return problems


def _blocks(
    flags: Flags, toggles: ToggleSet, config: TrainerConfig, problems: list[str]
) -> tuple[list[Block], ArmFile | None]:
    if flags.arms is None:
        plain = Block(index=0, arm="", warmup_steps=0, steps=config.train.steps, toggles=toggles)
        return [plain], None
    try:
        blocks, schedule = load_blocks(flags.arms, toggles)
    except NSAError as error:
        problems += error.problems
        return [], None
    total = sum(block.total_steps for block in blocks)
    asked, flag = flags.overrides.get("train.steps", (total, ""))
    if asked != total:
        problems.append(f"{flag} {asked}: the schedule of --arms has {total} steps; leave it out")
    return blocks, schedule
