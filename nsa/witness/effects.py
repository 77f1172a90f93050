"""Evidence that each toggle took effect: from DDP, the optimizer, the profiler, not from its name.

Every function returns (took_effect, evidence); took_effect None means that this process cannot
know, with the reason as evidence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nsa.attention import PathChoice
from nsa.attention.tracing import RangeCounts
from nsa.attention.triton.operators import RANGES_OPERATOR, SELECTED_OPERATOR
from nsa.config import Ranges
from nsa.contract import ATTEND_RANGE, INSTEAD, SELECTION_RANGES, TIMEOUT_TOLERANCE_S
from nsa.launch.envfile import sdpa_kernels
from nsa.launch.output import MIB
from nsa.settings import CONFIG_TOGGLES
from nsa.step.compiled import CALLS_BESIDE, COMPILED_NODE, count_compiled
from nsa.step.cuda_graphs import REPLAYED_NODE
from nsa.step.ddp import Wrapped
from nsa.step.engine import Engine
from nsa.toggles import AUTO, SAFE_MODE, TOGGLES, UNAVAILABLE, ToggleSet

Evidence = tuple[bool | None, Any]

# Operators in one call from which on the ranges are built in torch: v2 needs about 25, v1 makes one
# tensor from its lists.
_VECTORIZED = 10
_FUSED_KERNEL = "_fused_adamw_"
# Of one parameter; of many at once it is `_foreach_addcdiv_`.
_LOOP_KERNEL = "addcdiv_"
_RECOMPUTES = "NSA_DDP_DISABLE_GC"
# Judged in every run, set or not: the phases decide from them.
ALWAYS = (
    "NSA_PREFILL_BATCHED",
    "NSA_SEL_RANGES_V2",
    "NSA_OPT_FUSED",
    "NSA_DDP_BUCKET_MB",
    "NSA_DDP_COMPRESS",
)
# What has an effect only when it is on, what is a setting of DDP, and what the loss's graph shows.
_NOTHING_WHEN_OFF = ("NSA_SDPA_AUDIT", "NSA_USE_FA2", "NSA_NVTX", "NSA_DDP_SAFE_MODE")
_ABOUT_DDP = ("NSA_DDP_BUCKET_MB", "NSA_DDP_STATIC_GRAPH", "NSA_DDP_FIND_UNUSED")
# What runs the layers only while nothing watches them.
UNWATCHED = ("NSA_COMPILE", "NSA_CUDA_GRAPHS")


@dataclass(kw_only=True)
class Seen:
    """What was observed so far in a block's first steps.

    ranges: of the first forward pass. update: operators of the first optimizer step, by name.
    running: by toggle, the value that the object in charge works with, where one says so; None on
    a rank whose object does nothing. unwatched: nodes of the graph of the second step's first loss,
    by name, when nothing watches; None where no toggle asks for them.
    layer_calls: of the first layer in the first step, with its backward passes.
    """

    engine: Engine
    toggles: ToggleSet
    running: Mapping[str, Any]
    ranges: RangeCounts = field(default_factory=RangeCounts)
    update: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, str] | None = None
    wire: Mapping[str, Any] | None = None
    unwatched: Mapping[str, int] | None = None
    layer_calls: int = 0

    @property
    def wrapped(self) -> Wrapped:
        """The model in its wrapper, where the toggle is one of `_ABOUT_DDP`."""
        if self.engine.wrapped is None:
            raise RuntimeError("configure() comes before the first step")
        return self.engine.wrapped


def judge_all(seen: Seen) -> list[tuple[str, bool | None, Any]]:
    """(toggle, took_effect, evidence) for every toggle that was set, and for `ALWAYS`.

    A config that asks for recomputation has the toggle judged that may switch it off.
    """
    asked = {_RECOMPUTES} if seen.engine.plan.config.runtime.gradient_checkpointing else set()
    names = [n for n in TOGGLES if n in ALWAYS or n in asked or seen.toggles.is_set(n)]
    return [(name, *_judge(name, seen)) for name in names]


def _judge(name: str, seen: Seen) -> Evidence:
    if TOGGLES[name].reader != "trainer":
        return None, f"read by the {TOGGLES[name].reader}, not by the trainer"
    if name in seen.running:
        return _running(name, seen)
    if name in _NOTHING_WHEN_OFF and not seen.toggles.flag(name):
        return True, "off"
    if name in _ABOUT_DDP and not seen.engine.uses_ddp:
        return False, "no DDP in this launch"
    if name in UNWATCHED and seen.unwatched is None:
        return None, "no forward pass was looked at"
    rule = _RULES.get(name)
    # What nobody looks at is not proven: that the toggle was read says nothing about its effect.
    return rule(seen) if rule is not None else (None, "unproven: nothing here shows its effect")


def _running(name: str, seen: Seen) -> Evidence:
    value = seen.running[name]
    if value is None:
        return None, "rank 0 writes"
    return value == seen.toggles.values[name], {"in_force": value}


def _prefill(seen: Seen) -> Evidence:
    layers = seen.engine.plan.config.model.n_layers
    calls = sum(seen.ranges.entered[name] for name in SELECTION_RANGES.values())
    per_layer = calls / layers
    # Batched prefill builds the ranges once per layer, the sequential one once per token.
    path = "batched" if per_layer == 1 else "sequential" if per_layer > 1 else "none"
    asked = "batched" if seen.toggles.flag("NSA_PREFILL_BATCHED") else "sequential"
    return path == asked, {"path": path, "range_calls_per_layer": per_layer}


def _ranges(seen: Seen) -> Evidence:
    """The range's name is what code calls itself; v1 is loops in Python, v2 torch or one kernel."""
    names = sorted(set(SELECTION_RANGES.values()) & set(seen.ranges.entered))
    asked: Ranges = "v2" if seen.toggles.flag("NSA_SEL_RANGES_V2") else "v1"
    inside, entered = seen.ranges.inside, seen.ranges.entered
    operators = [round(inside[name].total() / entered[name], 1) for name in names]
    in_one = any(RANGES_OPERATOR in inside[name] for name in names)
    ran = ["v2" if in_one or count >= _VECTORIZED else "v1" for count in operators]
    evidence = {"ranges": names, "operators_per_call": operators, "ran": ran}
    return names == [SELECTION_RANGES[asked]] and ran == [asked], evidence


def _fused(seen: Seen) -> Evidence:
    optimizer = seen.engine.optimizer
    steps = [entry["step"] for entry in optimizer.state.values() if "step" in entry]
    kernels = sorted(name for name in seen.update if name.startswith(("_fused_", "_foreach_")))
    # What torch itself goes by, group by group.
    fused = [bool(group["fused"]) for group in optimizer.param_groups]
    evidence = {
        "optimizer": type(optimizer).__name__,
        "kernels": kernels,
        "fused": fused,
        "state_entries": len(steps),
        "step_device": sorted({str(step.device) for step in steps}),
    }
    asked = seen.toggles.flag("NSA_OPT_FUSED")
    ran = _FUSED_KERNEL in kernels
    # With fused=False instead of None torch drops its multi-tensor kernels on a GPU, too: there a
    # loop over parameters is not the plain optimizer that fused is compared with.
    looped = seen.engine.device.type == "cuda" and not asked and _LOOP_KERNEL in seen.update
    return bool(steps) and not looped and all(fused) == any(fused) == asked == ran, evidence


def _bucket(seen: Seen) -> Evidence:
    wrapped = seen.wrapped
    buckets = wrapped.buckets()
    if buckets is None:
        return False, "DDP has not rebuilt its buckets: too few steps"
    cap = seen.toggles.number("NSA_DDP_BUCKET_MB")
    goes_by, asked = wrapped.cap_bytes(), int(cap * MIB)
    # DDP begins the next one where one holds the cap: none has it without its last parameter, and
    # all but the one that was left over have it. One alone shows no more than that.
    above = max(bucket.size - bucket.last for bucket in buckets)
    most = min(sorted(bucket.size for bucket in buckets)[1:], default=asked)
    evidence = {
        "cap_mib": cap,
        "in_force_mib": round((goes_by or 0) / MIB, 4),
        "sizes_mib": [bucket.size_mib for bucket in buckets],
        "buckets": len(buckets),
    }
    return goes_by == asked and above < asked <= most, evidence


def _compress(seen: Seen) -> Evidence:
    asked = seen.toggles.text("NSA_DDP_COMPRESS")
    if not seen.engine.uses_ddp:
        return asked == "off", "no DDP in this launch: nothing on the wire"
    wrapped = seen.wrapped
    if asked == "off":
        return wrapped.wire is None, {"hook": None}
    # How often a step sends them is another matter, which the reader holds against this.
    once = sum(p.numel() * p.element_size() for p in wrapped.module.parameters() if p.requires_grad)
    evidence = {"hook": asked, **(seen.wire or {}), "bytes_of_gradients": once}
    before, after = (int(evidence.get(name, 0)) for name in ("bytes_before", "bytes_after"))
    return after < before, evidence


def _ddp_fact(key: str, toggle: str) -> Callable[[Seen], Evidence]:
    def rule(seen: Seen) -> Evidence:
        options = ("static_graph", "find_unused_parameters")
        facts = {option: bool(getattr(seen.wrapped.ddp, option)) for option in options}
        return facts[key] == seen.toggles.flag(toggle), facts

    return rule


def _checkpointing(seen: Seen) -> Evidence:
    config = seen.engine.plan.config
    running = seen.engine.model.cfg.gradient_checkpointing
    wanted = seen.engine.plan.checkpointing[0]
    micro_batches = config.train.accumulate_grad_batches
    evidence = {
        "asked": config.runtime.gradient_checkpointing,
        "running": running,
        "layer_calls": seen.layer_calls,
        "micro_batches": micro_batches,
    }
    # A layer that is recomputed is called again in the backward pass.
    return running == wanted == (seen.layer_calls > micro_batches), evidence


def _sdpa(toggle: str) -> Callable[[Seen], Evidence]:
    def rule(seen: Seen) -> Evidence:
        backends = sdpa_kernels()
        if seen.kernels is None:
            return None, {"allowed": backends, "kernels": "seen on rank 0 only"}
        ran = {k for kernel in seen.kernels.values() for k in kernel.split("+")}
        ran -= {"explicit_softmax"}
        evidence = {"allowed": backends, "kernels": dict(seen.kernels)}
        if not seen.toggles.flag(toggle):
            return True, evidence
        if not ran - {"none"}:
            return False, evidence | {"why": "no SDPA kernel ran: nothing to allow or forbid"}
        return (ran == {"flash"} if "ONLY" in toggle else "flash" not in ran), evidence

    return rule


def _audit(seen: Seen) -> Evidence:
    if seen.kernels is None:
        return None, "the audit runs on rank 0"
    return "none" not in seen.kernels.values(), dict(seen.kernels)


def _self_test(seen: Seen) -> Evidence:
    asked, tested = seen.toggles.text("NSA_SELF_TEST"), seen.engine.dispatch.tested
    return asked == "auto" or bool(tested) == (asked == "on"), {"tested": list(tested)}


def _fa2(_: Seen) -> Evidence:
    there = importlib.util.find_spec("flash_attn") is not None
    state = "" if there else "the package flash_attn is missing, and "
    return False, f"not available: {state}{UNAVAILABLE['NSA_USE_FA2']}"


def _triton(seen: Seen) -> Evidence:
    """The kernels' operator inside the branch's range is what ran, whatever was chosen."""
    asked = seen.toggles.values["NSA_USE_TRITON_SEL"]
    ran = seen.ranges.inside[ATTEND_RANGE]
    found = "triton" if SELECTED_OPERATOR in ran else "sdpa"
    choice = seen.engine.dispatch.selected(seen.toggles)
    evidence = {"ran": found, "chosen": str(choice)}
    if asked == AUTO:
        return True, evidence | _instead(choice, fast="triton")
    return (found == "triton") == (asked == "1"), evidence


def _instead(choice: PathChoice, *, fast: str) -> dict[str, str]:
    """Of a way that is `auto`: why the slow one runs, where it does, for a row to say."""
    return {} if choice.value == fast else {INSTEAD: str(choice)}


def _nvtx(seen: Seen) -> Evidence:
    if seen.engine.device.type != "cuda":
        return None, "NVTX needs CUDA; the same ranges are in the profiler's trace"
    return None, "ranges are emitted; --profile-steps proves them from the trace"


def _scaler(key: str) -> Callable[[Seen], Evidence]:
    def rule(seen: Seen) -> Evidence:
        if not seen.engine.scaler.is_enabled():
            precision = seen.engine.plan.config.runtime.precision
            return False, f"no gradient scaler: precision is {precision}"
        return True, {key: seen.engine.scaler.state_dict()[key]}

    return rule


def _config_value(dotted: str, name: str) -> Callable[[Seen], Evidence]:
    section, _, key = dotted.partition(".")

    def rule(seen: Seen) -> Evidence:
        plan = seen.engine.plan
        value = plan.config.model_dump()[section][key]
        origin = plan.loaded.sources.get(dotted, "config")
        return origin == name, {"value": value, "from": origin}

    return rule


def _safe_mode(seen: Seen) -> Evidence:
    found = {name: seen.toggles.values[name] for name in SAFE_MODE}
    wrapped = seen.engine.wrapped
    views = bool(wrapped and wrapped.ddp and wrapped.ddp.gradient_as_bucket_view)
    return found == SAFE_MODE and not views, {**found, "gradient_as_bucket_view": views}


def _timeout(seen: Seen) -> Evidence:
    ranks = seen.engine.ranks
    if not ranks.grouped:
        return False, "no process group in this launch"
    told, asked_s = ranks.timeout_s, seen.toggles.number("NSA_PG_TIMEOUT_MIN") * 60
    if told is None:
        return None, "this torch does not tell the timeout of a process group"
    return abs(told - asked_s) < TIMEOUT_TOLERANCE_S, {"asked_s": asked_s, "timeout_s": told}


def _compile(seen: Seen) -> Evidence:
    """Every compiled call leaves a node of its own in the graph that autograd keeps of the loss."""
    engine, nodes = seen.engine, seen.unwatched or {}
    choice = engine.dispatch.layers(seen.toggles)
    # A replayed layer is one node of the recording's instead, whatever was recorded.
    layers = 0 if engine.model.recording is not None else engine.plan.config.model.n_layers
    wanted = 0 if choice.value == "off" else layers + CALLS_BESIDE
    did = count_compiled()
    evidence: dict[str, Any] = {
        "compiled_calls": nodes.get(COMPILED_NODE, 0),
        "wanted": wanted,
        "graphs": did.graphs,
        "breaks": did.breaks,
        "furthest_off": [str(gap) for gap in engine.gaps],
    }
    if seen.toggles.text("NSA_COMPILE") == AUTO:
        evidence |= _instead(choice, fast="layer")
    took = evidence["compiled_calls"] == wanted and (choice.value == "off" or did.breaks == 0)
    return took, evidence


def _cuda_graphs(seen: Seen) -> Evidence:
    """A replayed layer leaves one node in the graph that autograd keeps of the loss."""
    choice = seen.engine.dispatch.replay(seen.toggles)
    wanted = seen.engine.plan.config.model.n_layers * (choice.value == "1")
    found = (seen.unwatched or {}).get(REPLAYED_NODE, 0)
    evidence: dict[str, Any] = {"replayed_layers": found, "wanted": wanted}
    if seen.engine.replay_gap is not None:
        evidence["furthest_off"] = str(seen.engine.replay_gap)
    if seen.toggles.values["NSA_CUDA_GRAPHS"] == AUTO:
        evidence |= _instead(choice, fast="1")
    return found == wanted, evidence


_RULES: dict[str, Callable[[Seen], Evidence]] = {
    "NSA_PREFILL_BATCHED": _prefill,
    "NSA_SEL_RANGES_V2": _ranges,
    "NSA_OPT_FUSED": _fused,
    "NSA_DDP_BUCKET_MB": _bucket,
    "NSA_COMPILE": _compile,
    "NSA_CUDA_GRAPHS": _cuda_graphs,
    "NSA_DDP_COMPRESS": _compress,
    "NSA_DDP_STATIC_GRAPH": _ddp_fact("static_graph", "NSA_DDP_STATIC_GRAPH"),
    "NSA_DDP_FIND_UNUSED": _ddp_fact("find_unused_parameters", "NSA_DDP_FIND_UNUSED"),
    _RECOMPUTES: _checkpointing,
    "NSA_SDPA_AUDIT": _audit,
    "NSA_SDPA_FLASH_ONLY": _sdpa("NSA_SDPA_FLASH_ONLY"),
    "NSA_SDPA_NO_FLASH": _sdpa("NSA_SDPA_NO_FLASH"),
    "NSA_SELF_TEST": _self_test,
    "NSA_USE_FA2": _fa2,
    "NSA_USE_TRITON_SEL": _triton,
    "NSA_NVTX": _nvtx,
    "NSA_SCALER_INIT_SCALE": _scaler("scale"),
    "NSA_SCALER_GROWTH_INTERVAL": _scaler("growth_interval"),
    "NSA_SCALER_GROWTH_FACTOR": _scaler("growth_factor"),
    "NSA_SCALER_BACKOFF_FACTOR": _scaler("backoff_factor"),
    **{name: _config_value(key, name) for name, key in CONFIG_TOGGLES.items()},
    "NSA_DDP_SAFE_MODE": _safe_mode,
    "NSA_PG_TIMEOUT_MIN": _timeout,
}
