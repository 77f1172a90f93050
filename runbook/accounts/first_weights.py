"""The model's first weights and its size: as the config and the equations of initialization demand.

The trainer tells how each piece of its parameters is distributed before the first step; what that
has to be follows here from the config alone: all weights normal with deviation 0.02, those that
write into the residual stream with 0.02 / sqrt(2 layers), norms 1, biases 0
(docs/trainer-contract.md, "First weights").

Every bound holds for a sample of any size, not only in the limit of a large one, and a healthy
launch passes the least likely of them with a chance of 1e-12 for each piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa.contract import WEIGHT_SIGNS
from runbook.records.evidence import RankLog

DEVIATION = 0.02
# Chance that one bound alarms on one healthy piece, and what it is in nats.
CHANCE = 1e-12
_NATS = math.log(2 / CHANCE)
# What `groups_of` raises where env.json describes no shape of a model.
NO_SHAPE = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)
# Sums of the same numbers in another order.
_SUMMED = 1e-6
# Keys and values of three branches: each has keys and values of its own.
BRANCHES = ("cmp", "sel", "win")
# Of a parameter in a checkpoint: itself and two moments of Adam, in fp32.
_BYTES_OF_A_PARAMETER = 12
# Room beside the checkpoints that are kept: one more is written before any is removed.
DISK_MARGIN = 1.1


@dataclass(frozen=True, kw_only=True)
class Group:
    """Pieces of the parameters with one job. size: elements of one; pieces: how many there are.

    deviation: of the normal distribution around 0 that they are drawn from; None where all of them
    begin as `constant`.
    """

    pieces: int
    size: int
    deviation: float | None = DEVIATION
    constant: float = 0.0


def groups_of(env: Mapping[str, Any]) -> dict[str, Group]:
    """The parameters of the model that env.json's config describes, by their job.

    Raises one of NO_SHAPE where env.json lacks a part of the shape, or that is no shape.
    """
    model, nsa = (_said(env["config"][section]) for section in ("model", "nsa"))
    dim, heads, groups, layers = (
        model[name] for name in ("dim", "n_heads", "n_kv_groups", "n_layers")
    )
    widths = {"k": model["d_k"], "v": model["d_v"]}
    block, learned = nsa["l"], {"avg": False, "mlp": True}[nsa["phi"]]
    hidden = max(1, round(model["mlp_ratio"] * dim))
    vocabulary = env["effective"]["vocab_size"] * dim
    residual = DEVIATION / math.sqrt(2 * layers)
    found = {"embedding": Group(pieces=1, size=vocabulary)}
    if not model["tie_embeddings"]:
        found["head"] = Group(pieces=1, size=vocabulary)

    def each(name: str, size: int, **how: Any) -> None:
        found[name] = Group(pieces=layers, size=size, **how)

    each("attention_norm", dim, deviation=None, constant=1.0)
    each("mlp_norm", dim, deviation=None, constant=1.0)
    found["norm"] = Group(pieces=1, size=dim, deviation=None, constant=1.0)
    each("attention.q", heads * widths["k"] * dim)
    for kind, width in widths.items():
        for branch in BRANCHES:
            each(f"attention.{kind}_{branch}", groups * width * dim)
        if learned:
            flat, inner = block * width, 2 * width
            name = f"attention.compress_{kind}"
            each(f"{name}.position", flat)
            each(f"{name}.net.0", flat * inner)
            each(f"{name}.net.0.bias", inner, deviation=None)
            each(f"{name}.net.2", inner * width)
    each("attention.gates", len(BRANCHES) * heads * dim)
    each("attention.gate_bias", len(BRANCHES) * heads, deviation=None)
    each("attention.out_proj", heads * widths["v"] * dim, deviation=residual)
    each("mlp.gate_up", 2 * hidden * dim)
    each("mlp.down", hidden * dim, deviation=residual)
    return found


def first_weights_account(ranks: Sequence[RankLog], env: Mapping[str, Any]) -> list[str]:
    """Every piece of the parameters begins as it has to, on all ranks alike, and no two alike.

    A launch that goes on from a checkpoint has no first weights.
    """
    if not begins(ranks):
        return []
    try:
        wanted = groups_of(env)
    except NO_SHAPE:
        return ["env.json does not say which shape the model has"]
    problems: list[str] = []
    sound: dict[str, Mapping[str, Any]] = {}
    for rank in ranks:
        told = _told(rank)
        if told.keys() != wanted.keys():
            odd = ", ".join(sorted(told.keys() ^ wanted.keys()))
            problems.append(f"rank {rank.rank} does not say how its weights began: {odd}")
            continue
        for name, group in wanted.items():
            if text := _odd(told[name], group):
                problems.append(f"rank {rank.rank}: {name} begins {text}")
            elif not _alike(told[name], sound.setdefault(name, told[name])):
                problems.append(f"rank {rank.rank}: {name} begins otherwise than on other ranks")
        problems += [f"rank {rank.rank}: {text}" for text in _twins(told, wanted)]
    return problems


def begins(ranks: Sequence[RankLog]) -> bool:
    """Did the launch draw its weights, and not go on from a checkpoint, on any rank?"""
    return any(rank.first_step == 1 for rank in ranks)


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a section says; a null says nothing."""
    return {name: value for name, value in section.items() if value is not None}


def _told(rank: RankLog) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = (rank.proof or {}).get("weights") or {}
    return found


def _odd(told: Mapping[str, Any], group: Group) -> str:
    """In what the pieces of a group do not begin as they have to: the first that does not."""
    names = ("n", "mean", "rms", "least", "most", "signs")
    columns = [told.get(name) or () for name in names]
    if any(len(column) != group.pieces or None in column for column in columns):
        return f"as {len(columns[0])} pieces that are told of, the config has {group.pieces}"
    for number, (n, mean, rms, least, most, _) in enumerate(zip(*columns, strict=True)):
        where = f" (layer {number})" if group.pieces > 1 else ""
        if n != group.size:
            text = f"with {n} elements, the config has {group.size}"
        elif group.deviation is None:
            text = f"between {least:.4g} and {most:.4g}, has to be {group.constant:g}"
            text = "" if least == most == group.constant else text
        else:
            text = _not_drawn(n, mean, rms, max(-least, most), group.deviation)
        if text:
            return text + where
    return ""


def _not_drawn(n: int, mean: float, rms: float, largest: float, deviation: float) -> str:
    """What of a piece no sample of its normal distribution has, or an empty string."""
    # Tails of a sum of squares (Laurent and Massart 2000, lemma 1).
    up, down = 2 * math.sqrt(_NATS / n) + 2 * _NATS / n, 2 * math.sqrt(_NATS / n)
    share = (rms / deviation) ** 2
    if not 1 - down <= share <= 1 + up:
        low, high = (deviation * math.sqrt(max(0.0, part)) for part in (1 - down, 1 + up))
        return f"with a deviation of {rms:.4g}, has to be {deviation:.4g} ({low:.4g} to {high:.4g})"
    most = deviation * math.sqrt(2 * _NATS / n)
    if not abs(mean) <= most:
        return f"with a mean of {mean:.4g}, has to be 0 within {most:.4g}"
    # Neither a heavier tail, nor one that is cut off as a uniform distribution's is.
    beyond = n * math.erfc(largest / deviation / math.sqrt(2))
    if not CHANCE <= beyond <= _NATS:
        return (
            f"with {largest:.4g} as its largest element: of {n} normal ones {beyond:.3g} lie beyond"
        )
    return ""


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Are these whole numbers of the same group those of the same weights?"""
    if any(one.get(name) != other.get(name) for name in ("signs", "least", "most")):
        return False
    return all(
        abs(left - right) <= _SUMMED * rms
        for name in ("mean", "rms")
        for left, right, rms in zip(one[name], other[name], one["rms"], strict=True)
    )


def _twins(told: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Group]) -> Iterator[str]:
    """Pieces that begin with the signs of another: by chance two in 2^64."""
    seen: dict[str, str] = {}
    for name, group in wanted.items():
        if group.deviation is None or group.size < WEIGHT_SIGNS:
            continue
        for number, signs in enumerate(told[name].get("signs") or ()):
            here = f"{name} (layer {number})" if group.pieces > 1 else name
            if signs in seen:
                yield f"{here} begins with the same weights as {seen[signs]}, up to a factor"
                return
            seen[signs] = here


def size_account(env: Mapping[str, Any]) -> list[str]:
    """env.json counts the parameters that a model of its config has, a shared one once."""
    told = (env.get("effective") or {}).get("n_params")
    try:
        count = parameters(env)
    except NO_SHAPE:
        return ["env.json does not say which shape the model has"]
    if told == count:
        return []
    return [f"env.json counts {told} parameters, a model of its config has {count}"]


def parameters(env: Mapping[str, Any]) -> int:
    """Parameters of the model that env.json's config describes. Raises as `groups_of` does."""
    return int(sum(group.pieces * group.size for group in groups_of(env).values()))


def checkpoint_gib(count: int) -> float:
    """GiB of the checkpoint of a model of so many parameters."""
    return count * _BYTES_OF_A_PARAMETER / 1024**3
