"""The trainer's configuration: strict, complete, and every error of it in one message.

Three layers: the YAML file, then `NSA_*` overrides, then command-line flags. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsa.config import ModelConfig, NSAConfig
from nsa.contract import REFUSAL, NSAError, did_you_mean
from nsa.strict_yaml import MOST_BYTES, load_strict
from nsa.toggles import TOGGLES

# A query of a shorter window sees its own key alone.
LEAST_WINDOW = 2

# By tokenizer. GPT-2's 50,257 tokens are padded to a multiple of 128, for the GPU's matrix units.
VOCAB_SIZES = {"byte": 256, "gpt2": 50_304}

# A toggle that is the same setting as a key of the config, over which it goes.
CONFIG_TOGGLES = {name: row.config_key for name, row in TOGGLES.items() if row.config_key}

# The trainer's flag that has the last word on a key of the config, what it takes, and its help.
OVERRIDES: dict[str, tuple[str, str, str]] = {
    "data.dataset": ("--dataset", "NAME", "synthetic, markov, local or fineweb_edu"),
    "data.local_path": ("--local-path", "PATH", "file or folder for --dataset local"),
    "data.loader_timeout_s": ("--loader-timeout", "S", "seconds to wait for a batch"),
    "train.steps": ("--steps", "N", "optimizer steps"),
    "train.seq_len": ("--seq-len", "N", "tokens per sequence"),
    "train.batch_size": ("--batch-size", "N", "global batch, sequences"),
    "train.accumulate_grad_batches": ("--accum", "N", "micro-batches per optimizer step"),
    "train.out_dir": ("--out-dir", "DIR", "folder for run directories"),
    "train.seed": ("--seed", "N", "seed of weights and data"),
    "train.log_every": ("--log-every", "N", "steps between log lines"),
    "runtime.precision": ("--precision", "NAME", "fp32, bf16 or fp16"),
}

# Sizes and steps are 32-bit numbers to the kernels; a seed is one of 63 bits to every generator.
_LARGEST, _LARGEST_SEED = 2**31 - 1, 2**63 - 1
Whole = Annotated[int, Field(ge=1, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Least0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ConfigError(NSAError):
    """The launch cannot start as asked; the message lists every reason."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    """Shape of the language model."""

    dim: Whole
    n_layers: Whole
    n_heads: Whole
    n_kv_groups: Whole
    d_k: Whole
    d_v: Whole
    mlp_ratio: Positive = 8 / 3
    tie_embeddings: bool = True


class NsaSection(_Section):
    """Shape of the sparse attention; the names are the paper's."""

    l: Whole  # noqa: E741 - the paper's name
    d: Whole
    l_sel: Whole
    n_sel: Whole
    w: Whole
    phi: Literal["avg", "mlp"] = "avg"


class DataSection(_Section):
    """Where the tokens come from."""

    tokenizer: Literal["byte", "gpt2"]
    tokenizer_file: str = ""
    dataset: Literal["synthetic", "markov", "local", "fineweb_edu"] = "synthetic"
    local_path: str = ""
    text_field: str = "text"
    loader_timeout_s: Positive = 120.0
    synthetic_on_fail: bool = False


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank reads: batches of its own of so many sequences, as one of so many ranks."""

    seq_len: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0


class RuntimeSection(_Section):
    """Device, numbers and kernels."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    use_flash: bool = True
    use_triton_sel: bool = False
    gradient_checkpointing: bool = False


class TrainSection(_Section):
    """The optimization. batch_size is global: sequences of all ranks in one micro-batch."""

    steps: Whole
    seq_len: Annotated[int, Field(ge=2, le=_LARGEST)]
    batch_size: Whole
    lr: Least0
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: Count = 0
    weight_decay: Least0 = 0.01
    grad_clip: Least0 = 1.0
    accumulate_grad_batches: Whole = 1
    log_every: Whole = 20
    eval_every: Count = 0
    eval_batches: Whole = 4
    save_every: Count = 0
    keep_last: Count = 0
    keep_every: Count = 0
    keep_best: bool = False
    seed: Annotated[int, Field(ge=0, le=_LARGEST_SEED)] = 1337
    out_dir: str = "artifacts/train"


def share_problem(batch: int, ranks: int) -> str:
    """Why a global batch cannot be shared by so many ranks; empty if it can."""
    if batch % ranks == 0:
        return ""
    fitting = dict.fromkeys((ranks * max(1, batch // ranks), ranks * (batch // ranks + 1)))
    return (
        f"train.batch_size={batch} is the global batch and must be divisible by the "
        f"{ranks} ranks: use {' or '.join(map(str, fitting))}"
    )


class TrainerConfig(_Section):
    """One whole config file."""

    model: ModelSection
    nsa: NsaSection
    data: DataSection
    runtime: RuntimeSection = RuntimeSection()
    train: TrainSection

    def attention(self) -> NSAConfig:
        """The attention's shape. Raises NSAError for shapes that do not fit together."""
        return _attention(self.model, self.nsa)


def _attention(model: ModelSection, nsa: NsaSection) -> NSAConfig:
    shape = model.model_dump(exclude={"n_layers", "mlp_ratio", "tie_embeddings"})
    return NSAConfig(**shape, **nsa.model_dump())


# Values by key ("train.lr"), each with the flag or the toggle that puts it over the file's.
Overrides = Mapping[str, tuple[Any, str]]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A valid config and where each value that is not the file's came from."""

    config: TrainerConfig
    sources: Mapping[str, str]
    path: str
    schedule_steps: int


def load_config(
    path: str | Path,
    overrides: Overrides = MappingProxyType({}),
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    """Read, override and validate a config file; `settings`, by key, count as if the file said so.

    Raises ConfigError that lists everything wrong: the file, its keys, its values, the values
    put over it, and shapes that do not fit together.
    """
    data, problems = _read(Path(path))
    if data is None:
        raise refusal(problems)
    _put(data, settings)
    # A flag that shortens a run leaves its learning-rate schedule as long as the file says.
    train = data.get("train")
    file_steps = train.get("steps") if isinstance(train, dict) else None
    _put(data, {key: value for key, (value, _) in overrides.items()})
    origins = {key: origin for key, (_, origin) in overrides.items()}
    sources = dict.fromkeys(settings, "--set") | origins
    config = _validate(data, sources, problems)
    if problems or config is None:
        raise refusal(problems)
    return Loaded(
        config=config,
        sources=sources,
        path=str(path),
        schedule_steps=file_steps if type(file_steps) is int else 0,
    )


def _put(data: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        section, _, key = name.partition(".")
        owner = data.setdefault(section, {})
        if isinstance(owner, dict):
            owner[key] = value


def is_text(name: str) -> bool:
    """Is this key's value text, so that `7` on the command line is no number?"""
    section, _, key = name.partition(".")
    owner = TrainerConfig.model_fields.get(section)
    field = getattr(owner and owner.annotation, "model_fields", {}).get(key)
    return field is not None and field.annotation is str


def refusal(problems: Sequence[str]) -> ConfigError:
    """The error that lists every reason why a launch cannot start."""
    return ConfigError.listing(REFUSAL, problems)


def _read(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    if path.is_fifo():
        return None, [f"config {path}: is a pipe, of which one rank could read; save it as a file"]
    try:
        with path.open("rb") as stream:
            text = stream.read(MOST_BYTES + 1).decode("utf-8")
    except OSError as error:
        return None, [f"config {path}: {error.strerror or error}"]
    except UnicodeDecodeError as error:
        return None, [f"config {path}: not UTF-8 text ({error.reason} at byte {error.start})"]
    data, problems = load_strict(text)
    problems = [f"config {path}: {problem}" for problem in problems]
    if data is None and problems:
        return None, problems
    if not isinstance(data, dict):
        return None, [*problems, f"config {path}: must hold the sections {_names(TrainerConfig)}"]
    return data, problems


def _validate(
    data: dict[str, Any], sources: Mapping[str, str], problems: list[str]
) -> TrainerConfig | None:
    bad_sections, config = set(), None
    try:
        config = TrainerConfig.model_validate(data)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            bad_sections.add(str(item["loc"][0]))
            problems.append(_explain(cast("dict[str, Any]", item), sources))
    if not bad_sections & {"model", "nsa"}:
        problems += _shape_problems(data)
    return config


def _shape_problems(data: Mapping[str, Any]) -> list[str]:
    """Shapes that do not fit together or cannot be trained, although each value is allowed."""
    model = ModelSection.model_validate(data["model"])
    nsa = NsaSection.model_validate(data["nsa"])
    if nsa.w < LEAST_WINDOW:
        return [
            f"nsa.w={nsa.w}: must be at least {LEAST_WINDOW} to be trained: over one key softmax "
            "is 1, whatever the key, so the keys of the window would never get a gradient"
        ]
    try:
        attention = _attention(model, nsa)
        ModelConfig(
            vocab_size=VOCAB_SIZES["byte"],
            n_layers=model.n_layers,
            attention=attention,
            mlp_ratio=model.mlp_ratio,
        )
    except NSAError as error:
        return list(error.problems)
    return []


def _explain(item: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    loc = tuple(str(part) for part in item["loc"])
    where = ".".join(loc)
    if where in sources:
        where = f"{sources[where]} ({where})"
    if item["type"] == "extra_forbidden":
        return f"{where}: no such key{_hint(loc)}"
    if item["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {item['msg']}, got {item['input']!r}"


def _hint(loc: tuple[str, ...]) -> str:
    owner: type[BaseModel] = TrainerConfig
    if len(loc) > 1 and loc[0] in TrainerConfig.model_fields:
        owner = cast("type[BaseModel]", TrainerConfig.model_fields[loc[0]].annotation)
    return did_you_mean(loc[-1], owner.model_fields) or f"; allowed: {_names(owner)}"


def _names(owner: type[BaseModel]) -> str:
    return ", ".join(owner.model_fields)
