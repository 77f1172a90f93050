"""Shapes of JSON documents: what does not have the type that its readers expect is left out.

A trainer, or whoever edited its files, may write anything. Left out and named, a value is missing
for every reader alike, and no reader has to ask for its type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nsa.contract import THREAD_VARIABLES, Ceiling, Event

_DIGEST = re.compile(r"[0-9a-fA-F]{1,16}")
# Of a GPU in devices_before.json and devices_after.json.
DEVICE_COUNTERS = (
    "ecc_corrected_volatile",
    "ecc_uncorrected_volatile",
    "ecc_corrected_aggregate",
    "ecc_uncorrected_aggregate",
    "remapped_correctable",
    "remapped_uncorrectable",
    "remap_pending",
    "remap_failure",
    "retired_single_bit",
    "retired_double_bit",
    "retired_pending",
    "pcie_replays",
    "power_violation_s",
    "thermal_violation_s",
)
LINK_FIELDS = ("gen", "gen_max", "width", "width_max")
# The power limit in force and the one that the card is sold with.
POWER_FIELDS = ("limit_w", "default_w")
# Above this a whole number is no count of anything; 2^64 - 1 is the largest sum that is kept.
LARGEST_COUNT = 2**64


def is_count(value: object) -> bool:
    """A whole number that fits into 64 bits; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_COUNT


def is_any_number(value: object) -> bool:
    """A number, NaN and infinities included."""
    return isinstance(value, float) or is_count(value)


def is_number(value: object) -> bool:
    """A finite number."""
    return is_any_number(value) and math.isfinite(value)  # type: ignore[arg-type]


def is_flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def is_text(value: object) -> bool:
    """A string."""
    return isinstance(value, str)


def is_digest(value: object) -> bool:
    """A 64-bit number in hexadecimal."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def anything(value: object) -> bool:
    """Whatever it is: only shown, or compared as it stands."""
    del value
    return True


@dataclass(frozen=True)
class Fields:
    """A mapping with these fields; others stay as they are, one of the wrong shape is left out."""

    shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class Each:
    """A mapping of names to values of one shape; a single other value spoils all of it."""

    shape: Shape


@dataclass(frozen=True)
class Items:
    """A list of one shape; a single other item spoils all of it."""

    shape: Shape


Shape = Callable[[object], bool] | Fields | Each | Items
_NOTHING = object()


def shaped(
    document: Mapping[str, Any], shape: Fields, where: str
) -> tuple[dict[str, Any], list[str]]:
    """The document without what has another shape, and one sentence for each part left out.

    A null fits a field: it says that nothing is known.
    """
    problems: list[str] = []
    fitted: dict[str, Any] = _fit(document, shape, where, problems)
    return fitted, problems


def _fit(value: Any, shape: Shape, where: str, problems: list[str]) -> Any:
    if value is None:
        return None
    if isinstance(shape, Fields) and isinstance(value, Mapping):
        kept = dict(value)
        for name, inner in shape.shapes.items():
            if name in kept:
                found = _fit(kept[name], inner, f"{where}.{name}", problems)
                if found is _NOTHING:
                    del kept[name]
                else:
                    kept[name] = found
        return kept
    if isinstance(shape, Each) and isinstance(value, Mapping):
        every = {
            key: _fit(one, shape.shape, f"{where}.{key}", problems) for key, one in value.items()
        }
        return _NOTHING if _spoiled(every.values(), where, problems) else every
    if isinstance(shape, Items) and isinstance(value, list):
        items = [_fit(one, shape.shape, where, problems) for one in value]
        return _NOTHING if _spoiled(items, where, problems) else items
    if not isinstance(shape, Fields | Each | Items) and shape(value):
        return value
    problems.append(f"{where} has an unexpected value: {str(value)[:40]!r}")
    return _NOTHING


def _spoiled(items: Collection[Any], where: str, problems: list[str]) -> bool:
    """Does one item leave out all of them? A null among them has not been told yet."""
    if any(one is None for one in items):
        problems.append(f"{where} holds a null")
    return any(one is _NOTHING or one is None for one in items)


ENV = Fields(
    {
        "run_token": is_text,
        **dict.fromkeys(("world_size", "nodes"), is_count),
        "config_sha256": is_text,
        "git": Fields({}),
        "package": Fields({"path": is_text, "sha256": is_text}),
        "versions": Fields({}),
        "device": Fields(
            {"type": is_text, "name": is_text, "count": is_count, "uuids": Items(is_text)}
        ),
        "config": Fields(
            {
                "train": Fields(
                    {
                        **dict.fromkeys(("lr", "grad_clip"), is_number),
                        **dict.fromkeys(
                            ("warmup_steps", "seed", "eval_every", "eval_batches"), is_count
                        ),
                        **dict.fromkeys(("keep_last", "keep_every"), is_count),
                        "keep_best": is_flag,
                        "lr_schedule": is_text,
                    }
                ),
                "model": Fields(
                    {
                        **dict.fromkeys(
                            ("dim", "n_layers", "n_heads", "n_kv_groups", "d_k", "d_v"), is_count
                        ),
                        "mlp_ratio": is_number,
                        "tie_embeddings": is_flag,
                    }
                ),
                "nsa": Fields({**dict.fromkeys(("l", "l_sel", "n_sel"), is_count), "phi": is_text}),
            }
        ),
        "effective": Fields(
            {
                **dict.fromkeys(
                    ("seq_len", "global_batch", "per_rank_batch", "accumulation", "steps"),
                    is_count,
                ),
                "schedule_steps": is_count,
                **dict.fromkeys(("tokens_per_step", "n_params", "vocab_size"), is_count),
                **dict.fromkeys(("model_flops_per_token", "loss_floor"), is_number),
                **dict.fromkeys(("dtype", "device", "dataset", "loss_floor_source"), is_text),
            }
        ),
        "attention": Fields(
            {
                "window": Fields({"value": is_text, "reason": is_text}),
                "selected": Fields({"value": is_text, "reason": is_text}),
                "self_test": Fields(
                    {
                        "ran": is_flag,
                        "reason": is_text,
                        "seq_len": is_count,
                        "dtype": is_text,
                        "paths": Each(
                            Fields(
                                {
                                    "agrees": is_flag,
                                    "refused": is_text,
                                    "problems": Items(is_text),
                                    "whole": Fields({}),
                                }
                            )
                        ),
                    }
                ),
            }
        ),
        "policies": Fields({}),
        "toggles": Items(Fields({"name": is_text})),
        "notes": Items(anything),
        "resumed": Fields(
            {"path": is_text, "step": is_count, "sha256": is_text, "refused": Items(is_text)}
        ),
        "arms": Fields(
            {
                "warmup_steps": is_count,
                "blocks": Items(Fields({"block": is_count, "arm": is_text, "set": Each(is_text)})),
            }
        ),
    }
)
AUDIT = Fields({"arms": Each(Fields({"branches": Each(Fields({"kernel": is_text}))}))})
PROFILE = Fields(
    {
        "ranges": Each(Fields({"count": is_count, "cpu_us": is_number, "cuda_us": is_number})),
        "python_share": is_number,
        "top_python": Items(Fields({"name": is_text, "share": is_number})),
        "steps": is_count,
        "wall_us": is_number,
        "gpu": Fields(
            {
                "window_us": is_number,
                "busy_us": is_number,
                "idle_us": is_number,
                "python_wait_us": is_number,
            }
        ),
    }
)
_MEASURED = Fields(
    {
        **dict.fromkeys(("size", "bytes", "ranks", "inner"), is_count),
        **dict.fromkeys(("host_s", "rate"), is_number),
        **dict.fromkeys(("dtype", "unit"), is_text),
        "seconds": Items(is_number),
    }
)
CEILINGS = Fields(
    {
        "run_token": is_text,
        "world_size": is_count,
        "ranks": Items(
            Fields(
                {
                    "rank": is_count,
                    "device": Fields(dict.fromkeys(("type", "name", "uuid"), is_text)),
                    **dict.fromkeys(Ceiling, _MEASURED),
                }
            )
        ),
    }
)
_DEVICE = Fields(
    {
        **dict.fromkeys(("index", "clock_events", "sm_max_mhz"), is_count),
        **dict.fromkeys(("uuid", "name", "pci", "problem"), is_text),
        "pci_path": Items(is_text),
        "counters": Fields(dict.fromkeys(DEVICE_COUNTERS, is_number)),
        "link": Fields(dict.fromkeys(LINK_FIELDS, is_count)),
        "power": Fields(dict.fromkeys(POWER_FIELDS, is_number)),
    }
)
DEVICES = Fields(
    {
        **dict.fromkeys(("source", "problem", "taken_at", "driver"), is_text),
        "gpus": Items(_DEVICE),
        "nodes": Items(is_text),
    }
)
KERNEL_LOG = Fields(
    {
        **dict.fromkeys(("source", "problem"), is_text),
        **dict.fromkeys(("others", "left_out"), is_count),
        "lost": is_flag,
        "lines": Items(is_text),
    }
)
CHECKOUT = Fields(
    {
        **dict.fromkeys(("commit", "sha", "path", "sha256"), is_text),
        "changed": Items(is_text),
    }
)
LOAD = Fields(
    {
        "problem": is_text,
        "cpus": is_count,
        **dict.fromkeys(("wall_s", "total_s", "busy_s", "own_s", "others_s", "steal_s"), is_number),
        **dict.fromkeys(("load_before", "load_after"), Items(is_number)),
    }
)
_SPOTS = (
    "embedding",
    "attention",
    "gates",
    "layer",
    "logits",
    "layers",
    "seams",
    "blocks_illegal",
    "blocks_shortfall",
)
_PROOF_NUMBERS = (
    "loss",
    "loss_again",
    "mean_low",
    "mean_high",
    "norm_told",
    "norm_before",
    "norm_after",
    "logit_gradient",
)
_PROOF = Fields(
    {
        **dict.fromkeys(_PROOF_NUMBERS, is_any_number),
        "positions": is_count,
        "own_gradient": Each(is_any_number),
        "wire": is_text,
        "missing": Items(is_text),
        "oracle": Fields(
            {
                "positions": Items(is_count),
                "shape": Each(anything),
                **dict.fromkeys(_SPOTS, is_any_number),
            }
        ),
        "text": Fields(
            {
                **dict.fromkeys(("documents", "bytes", "apart"), is_count),
                **dict.fromkeys(("read", "decoded"), is_text),
            }
        ),
        "weights": Each(
            Fields(
                {
                    "n": Items(is_count),
                    **dict.fromkeys(("mean", "rms", "least", "most"), Items(is_number)),
                    "below": Items(Items(is_count)),
                    "signs": Items(is_text),
                }
            )
        ),
    }
)
_SHADOW = ("weight", "first_moment", "second_moment", "norm", "rate", "jumps", "left")
# Of the heartbeats that are kept whole; those of every step are read field by field.
EVENTS: Mapping[str, Fields] = {
    Event.PROOF: _PROOF,
    Event.DDP_BUCKETS: Fields(
        {
            "arm": is_text,
            "block": is_count,
            "sizes_mib": Items(is_number),
            **dict.fromkeys(("bytes", "last_bytes"), Items(is_count)),
        }
    ),
    Event.ARM_FAILED: Fields({"arm": is_text, "block": is_count, "error": is_text}),
    Event.CHECKPOINT: Fields({"path": is_text, "seconds": is_any_number, "sha256": is_text}),
    Event.EVAL: Fields(
        {
            "step": is_count,
            "loss": is_any_number,
            "losses": Items(is_any_number),
            "again": Fields({"batch": is_count, "loss": is_any_number}),
            "embedded": is_count,
            "data": is_digest,
        }
    ),
    Event.NONFINITE: Fields({"step": is_count}),
    Event.HALT: Fields({"reason": is_text}),
    Event.EXIT: Fields(
        {
            "param_hash": is_text,
            "fetched_sum": is_count,
            "embedded_sum": is_count,
            "moved": Each(is_any_number),
            "largest_lr": is_any_number,
            "updates": Items(is_count),
            "first_update": Each(is_any_number),
            "shadow": Fields({"steps": Items(is_count), **dict.fromkeys(_SHADOW, is_any_number)}),
            "recomputed": Fields(
                {
                    "steps": Items(is_count),
                    "losses": Items(is_any_number),
                    "gradient": is_any_number,
                    "ranks": is_any_number,
                    "bias": Each(is_any_number),
                    "gates": Items(Items(Items(is_any_number))),
                }
            ),
            "proof": _PROOF,
            "in_force": Fields(
                {
                    "timeout_s": is_number,
                    **dict.fromkeys(("threads", "cpus"), is_count),
                    "variables": Fields(dict.fromkeys(THREAD_VARIABLES, is_text)),
                }
            ),
            "saved": Fields(
                {
                    "step": is_count,
                    "tensors": Items(is_text),
                    "elements": is_count,
                    "other": is_count,
                    "read": is_count,
                    "wrong": Items(is_count),
                    "unreadable": is_text,
                    "kept": Items(is_count),
                    "positions": Items(anything),
                }
            ),
        }
    ),
}
