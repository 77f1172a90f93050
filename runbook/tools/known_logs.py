"""What the logs of public trainers look like, so that nobody has to describe them.

A pattern takes a loss that is no number too, since a launch whose loss is NaN has to be seen: the
row is there, and its loss is a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runbook.records.own_trainer import PACE, LogMap

# What columns are called elsewhere; the first that is there is taken.
NAMES: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "loss/train", "train_loss_step"),
    "step": ("step", "global_step", "iteration", "iter", "update", "num_updates", "train/step"),
    "lr": ("lr", "learning_rate", "train/lr", "train/learning_rate"),
    "grad_norm": ("grad_norm", "gnorm", "train/grad_norm"),
    "dt_s": ("dt_s", "dt", "step_time", "step_time_s", "sec_per_step"),
    "dt_ms": ("dt_ms", "step_time_ms"),
    "toks_per_s": ("toks_per_s", "tokens_per_second", "tokens_per_sec", "tok_per_s"),
}


@dataclass(frozen=True, kw_only=True)
class KnownLog:
    """Lines on the console of one public trainer. advice: what it has to be told for a probe."""

    trainer: str
    pattern: str
    advice: str = ""


KNOWN = (
    # Its loss is left out where it is not above 0, NaN included: then the next word stands there.
    KnownLog(
        trainer="Megatron-LM",
        pattern=r"iteration +(?P<step>\d+)/.*? elapsed time per iteration \(ms\): "
        r"(?P<dt_ms>[\d.]+).*? learning rate: (?P<lr>\S+) .*?global batch size: +\d+ \| "
        r"(?:lm loss: )?(?P<loss>\S+)(?:.*? grad norm: (?P<grad_norm>\S+))?",
        advice="--log-interval 1",
    ),
    KnownLog(
        trainer="NeMo",
        pattern=r"Training epoch \d+, iteration (?P<step>\d+)/\d+ \| lr: (?P<lr>\S+) .*?"
        r"\breduced_train_loss: (?P<loss>\S+)(?:.*? train_step_timing in s: (?P<dt_s>\S+))?",
        advice="log_every_n_steps=1",
    ),
    # Its tps are of one device, and as many ranks as --local-ranks-filter names write each line.
    KnownLog(
        trainer="torchtitan",
        pattern=r"step: +(?P<step>\d+) +loss: +(?P<loss>\S+) +"
        r"(?:grad_norm: +(?P<grad_norm>\S+) +)?memory: ",
        advice="--metrics.log_freq 1, and LOG_RANK=0",
    ),
    KnownLog(
        trainer="Hugging Face Trainer",
        pattern=r"\{'loss': '?(?P<loss>[^',}]+)'?, (?:'grad_norm': '?(?P<grad_norm>[^',}]+)'?, )?"
        r"'learning_rate': '?(?P<lr>[^',}]+)'?, .*?'epoch': ",
        advice="--logging_steps 1",
    ),
    # A step is what an optimizer does: litgpt marks the micro-batches that end one.
    KnownLog(
        trainer="litgpt",
        pattern=r"iter \d+ \|? ?step (?P<step>\d+)[ |:]+loss train: (?P<loss>[^\s,]+), .*?\(step\)",
        advice="--train.log_interval 1",
    ),
    KnownLog(
        trainer="nanoGPT",
        pattern=r"iter (?P<step>\d+): loss (?P<loss>[^\s,]+), time (?P<dt_ms>[\d.]+)ms",
        advice="--log_interval=1",
    ),
)
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
_STEP = r"(?i)\b(?:step|iter(?:ation)?|update)\b\W{0,8}(?P<step>\d+)"
_LOSS = rf".*?\bloss\b[\s:=]*(?P<loss>{_NUMBER})"
_MS = rf".*?(?P<dt_ms>{_NUMBER}) ?ms\b"
# Of a trainer that nobody knows: a step, a loss, and with luck how long the step took.
_UNKNOWN = (_STEP + _LOSS + _MS, _STEP + _LOSS)


def by_pattern() -> Iterator[tuple[LogMap, str]]:
    """Maps of consoles with whose lines they are, the surest first; "" for nobody's."""
    for known in KNOWN:
        yield LogMap(pattern=known.pattern), known.trainer
    for pattern in _UNKNOWN:
        yield LogMap(pattern=pattern), ""


def by_columns(path: str, fields: Sequence[str]) -> LogMap | None:
    """The map of a table, or of documents in lines; None where no column is a loss."""
    columns: dict[str, str] = {}
    for ours, theirs in NAMES.items():
        named = next((name for name in theirs if name in fields), None)
        if named and not (ours in PACE and set(PACE) & columns.keys()):
            columns[ours] = named
    return LogMap(path=path, columns=columns) if "loss" in columns else None


def whose_columns(path: str, fields: Sequence[str]) -> str:
    """Lightning's CSVLogger writes metrics.csv, with the epoch before or after the step."""
    is_lightning = path.endswith("/metrics.csv") and {"epoch", "step"} <= set(fields)
    return "Lightning" if is_lightning else ""


def advice() -> str:
    """What each known trainer has to be told, or it writes a row for many steps."""
    return "; ".join(f"{known.trainer}: {known.advice}" for known in KNOWN)
