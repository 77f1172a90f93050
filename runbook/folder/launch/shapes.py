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
# Of a GPU in devices_before.json and devices_after.json, with what it means that one grew between
# the two: memory, driver or card failed (`fault`), something to tell, or a fault by its rate.
# `standing`: a fault also where it is there before a launch. Preflight found none of these, so it
# came since, perhaps while a launch on fewer GPUs left this one out.
DEVICE_COUNTERS: Mapping[str, str] = {
    # Corrected, the values stay right; the driver's own alarm for too many is Xid 92.
    "ecc_corrected_volatile": "told",
    "ecc_uncorrected_volatile": "standing fault",
    "ecc_corrected_aggregate": "told",
    "ecc_uncorrected_aggregate": "fault",
    "remapped_correctable": "fault",
    "remapped_uncorrectable": "fault",
    "remap_pending": "standing fault",
    "remap_failure": "standing fault",
    "pcie_replays": "rate",
    "power_violation_s": "",
    "thermal_violation_s": "told",
}
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


def is_text(value: object) -> bool:
    """A string."""
    return isinstance(value, str)


def is_digest(value: object) -> bool:
    """A 64-bit number in hexadecimal."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


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
_KINDS: Mapping[str, Shape] = {
    "text": is_text,
    "flag": lambda value: isinstance(value, bool),
    "count": is_count,
    "number": is_any_number,
    "finite": is_number,
    "digest": is_digest,
    # Only shown, or compared as it stands.
    "anything": lambda _: True,
    "mapping": Fields({}),
}


def fields(words: str = "", **nested: Shape) -> Fields:
    """The shape of a mapping: `kind: names`, with semicolons between, and what is nested in it.

    A kind is one of `_KINDS`, `[kind]` for a list of them, or `{kind}` for names with one each.

    >>> sorted(fields("count: size ranks; [finite]: seconds").shapes)
    ['ranks', 'seconds', 'size']
    """
    found: dict[str, Shape] = {}
    for part in filter(str.strip, words.split(";")):
        kind, names = part.split(":")
        found |= dict.fromkeys(names.split(), _shape_of(kind.strip()))
    return Fields({**found, **nested})


def _shape_of(kind: str) -> Shape:
    if kind[0] == "[":
        return Items(_shape_of(kind[1:-1]))
    return Each(_shape_of(kind[1:-1])) if kind[0] == "{" else _KINDS[kind]


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


_WHY = fields("text: value reason")
ENV = fields(
    "text: run_token config_sha256; count: world_size nodes; mapping: git versions policies;"
    "[anything]: notes argv",
    package=fields("text: path sha256"),
    device=fields("text: type name; count: count; [text]: uuids"),
    config=fields(
        train=fields(
            "finite: lr grad_clip; flag: keep_best; text: lr_schedule;"
            "count: warmup_steps seed eval_every eval_batches keep_last keep_every"
        ),
        model=fields(
            "count: dim n_layers n_heads n_kv_groups d_k d_v; finite: mlp_ratio;"
            "flag: tie_embeddings"
        ),
        nsa=fields("count: l l_sel n_sel; text: phi"),
    ),
    effective=fields(
        "count: seq_len global_batch per_rank_batch accumulation steps schedule_steps"
        " tokens_per_step n_params vocab_size;"
        "finite: model_flops_per_token loss_floor; text: dtype device dataset loss_floor_source"
    ),
    attention=fields(
        window=_WHY,
        selected=_WHY,
        self_test=fields(
            "flag: ran; text: reason dtype; count: seq_len",
            paths=Each(fields("flag: agrees; text: refused; [text]: problems; mapping: whole")),
        ),
    ),
    toggles=Items(fields("text: name")),
    resumed=fields("text: path sha256; count: step; [text]: refused"),
    arms=fields(
        "count: warmup_steps", blocks=Items(fields("count: block; text: arm; {text}: set"))
    ),
)
AUDIT = fields(arms=Each(fields(branches=Each(fields("text: kernel")))))
PROFILE = fields(
    "finite: python_share wall_us; count: steps",
    ranges=Each(fields("count: count; finite: cpu_us cuda_us")),
    top_python=Items(fields("text: name; finite: share")),
    gpu=fields("finite: window_us busy_us idle_us python_wait_us"),
)
_MEASURED = fields(
    "count: size bytes ranks inner; finite: host_s rate; text: dtype unit wrong;[finite]: seconds"
)
CEILINGS = fields(
    "text: run_token; count: world_size",
    ranks=Items(
        fields(
            "count: rank",
            device=fields("text: type name uuid"),
            **{str(one): _MEASURED for one in Ceiling},
        )
    ),
)
DEVICES = fields(
    "text: source problem taken_at driver; [text]: nodes",
    gpus=Items(
        fields(
            "count: index clock_events sm_max_mhz; text: uuid name pci problem; [text]: pci_path",
            counters=Fields(dict.fromkeys(DEVICE_COUNTERS, is_number)),
            link=Fields(dict.fromkeys(LINK_FIELDS, is_count)),
            power=Fields(dict.fromkeys(POWER_FIELDS, is_number)),
        )
    ),
)
KERNEL_LOG = fields("text: source problem; count: left_out; flag: lost; [text]: lines")
CHECKOUT = fields("text: commit sha path sha256; [text]: changed")
LOAD = fields(
    "text: problem; count: cpus; finite: wall_s total_s busy_s own_s others_s steal_s;"
    "[finite]: load_before load_after"
)
_PROOF = fields(
    "number: loss kept mean_low mean_high norm_told norm_before norm_after"
    " logit_gradient;"
    "count: positions; {number}: own_gradient; text: wire; [text]: missing",
    oracle=fields(
        "[count]: positions; {anything}: shape;"
        "number: embedding attention gates layer logits slope layers seams blocks_illegal"
        " blocks_shortfall"
    ),
    text=fields("count: documents bytes apart; text: read decoded"),
    weights=Each(fields("[count]: n; [finite]: mean rms least most; [text]: signs")),
)
# Of the heartbeats that are kept whole; those of every step are read field by field.
EVENTS: Mapping[str, Fields] = {
    Event.PROOF: _PROOF,
    Event.DDP_BUCKETS: fields(
        "text: arm; count: block; [finite]: sizes_mib; [count]: bytes last_bytes"
    ),
    Event.ARM_FAILED: fields("text: arm error; count: block"),
    Event.CHECKPOINT: fields("text: path sha256; number: seconds"),
    Event.EVAL: fields(
        "count: step embedded; number: loss; [number]: losses; digest: data",
        again=fields("count: batch; number: loss"),
    ),
    Event.NONFINITE: fields("count: step"),
    Event.HALT: fields("text: reason"),
    Event.EXIT: fields(
        "text: param_hash; count: fetched_sum embedded_sum; {number}: moved;"
        "{anything}: summed; number: largest_lr; [count]: updates",
        shadow=fields(
            "[count]: steps; number: weight first_moment second_moment norm rate jumps left"
        ),
        recomputed=fields(
            "[count]: steps; [number]: losses; [anything]: norms; number: gradient ranks;"
            "{number}: bias;"
            "[[[number]]]: gates; {anything}: seams layers logits slopes"
        ),
        proof=_PROOF,
        in_force=fields(
            "finite: timeout_s; count: threads cpus",
            variables=Fields(dict.fromkeys(THREAD_VARIABLES, is_text)),
        ),
        saved=fields(
            "count: step elements other read; [text]: tensors; [count]: wrong kept;"
            "text: unreadable; [anything]: positions"
        ),
    ),
}
