"""A toggle took effect only if something shows it; what a profile is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.autograd import DeviceType

from nsa.attention import PathChoice
from nsa.attention.sdpa import batched_sdpa
from nsa.attention.tracing import OperatorCount, RangeCounts, count_ranges
from nsa.config import NSAConfig, Way
from nsa.contract import ATTEND_RANGE, SELECTION_RANGES
from nsa.step.ddp import Bucket
from nsa.toggles import SAFE_MODE, TOGGLES, parse_toggles, with_safe_mode
from nsa.witness import effects
from nsa.witness.effects import Seen
from nsa.witness.profiling import (
    DEVICE_RANGE,
    HOST,
    WORK,
    Recorded,
    recorded,
    summarize,
    torch_profiler,
)
from nsa.witness.self_test import random_inputs

# Not in the table of rules: the loop and the tables say what they really do.
RUNNING = {
    "NSA_TB_DISABLE": False,
    "NSA_DISABLE_CSV_LOGS": True,
    "NSA_DISABLE_AUX_STATS": None,
    "NSA_HEARTBEAT_EVERY": 1,
    "NSA_MEM_DUMP_EVERY": 0,
}


def seen(variables: dict[str, str], engine: dict[str, Any] | None = None, **fields: Any) -> Seen:
    """What a launch with these toggles shows, of an engine that has these parts."""
    return Seen(
        engine=cast(
            "Any", SimpleNamespace(**{"wrapped": None, "uses_ddp": False, **(engine or {})})
        ),
        toggles=with_safe_mode(parse_toggles(variables)),
        **{"running": {}, **fields},
    )


def test_every_toggle_of_the_trainer_has_something_that_shows_its_effect() -> None:
    trainers = {name for name, row in TOGGLES.items() if row.reader == "trainer"}
    assert trainers == set(effects._RULES) | set(RUNNING)


def _capped(goes_by: float, buckets: Sequence[Bucket]) -> dict[str, Any]:
    """DDP with these buckets, which says that it goes by this cap."""
    wrapped = SimpleNamespace(
        ddp=True,
        buckets=lambda: buckets,
        cap_bytes=lambda: int(goes_by * 2**20),
    )
    return {"wrapped": wrapped, "uses_ddp": True}


# The last one is what was left over.
_CUT = (
    Bucket(size=600_000, last=100_000),
    Bucket(size=540_000, last=40_000),
    Bucket(size=400_000, last=100_000),
)


def _grouped(timeout_s: float | None, grouped: bool = True) -> dict[str, Any]:
    return {"ranks": SimpleNamespace(grouped=grouped, timeout_s=timeout_s)}


def _recomputing(wanted: bool, says: bool) -> dict[str, Any]:
    """Steps of two micro-batches; whether layers are called twice is asked for, and said."""
    config = SimpleNamespace(
        runtime=SimpleNamespace(gradient_checkpointing=wanted),
        train=SimpleNamespace(accumulate_grad_batches=2),
    )
    return {
        "plan": SimpleNamespace(config=config, checkpointing=(wanted, "")),
        "model": SimpleNamespace(cfg=SimpleNamespace(gradient_checkpointing=says)),
    }


# Ten weights of 4 bytes, in steps whose gradients are sent once.
_LINEAR = torch.nn.Linear(10, 1, bias=False)
_SENDS = {"wrapped": SimpleNamespace(ddp=object(), wire=object(), module=_LINEAR), "uses_ddp": True}


def _sent(before: int, after: int) -> dict[str, Any]:
    return {"wire": {"bytes_before": before, "bytes_after": after, "steps": 2}}


@pytest.mark.parametrize(
    ("word", "engine", "more", "took"),
    [
        # What runs is held against what was asked for; the loop itself says what it does.
        ("TB_DISABLE=1", {}, {"running": RUNNING}, False),
        ("DISABLE_CSV_LOGS=1", {}, {"running": RUNNING}, True),
        ("DISABLE_AUX_STATS=1", {}, {"running": RUNNING}, None),
        ("DDP_BUCKET_MB=0.5", _capped(1.0, _CUT), {}, False),
        ("DDP_BUCKET_MB=0.5", _capped(0.5, _CUT), {}, True),
        ("DDP_BUCKET_MB=0.5", _capped(0.5, _CUT[:1]), {}, True),
        ("DDP_BUCKET_MB=0.25", _capped(0.25, _CUT[:1]), {}, False),
        ("PG_TIMEOUT_MIN=5", _grouped(299.9995), {}, True),
        ("PG_TIMEOUT_MIN=5", _grouped(1800.0), {}, False),
        ("PG_TIMEOUT_MIN=5", _grouped(None), {}, None),
        ("PG_TIMEOUT_MIN=5", _grouped(300.0, grouped=False), {}, False),
        ("DDP_COMPRESS=bf16", _SENDS, _sent(80, 40), True),
        ("DDP_COMPRESS=bf16", _SENDS, _sent(80, 80), False),  # nothing is narrower
        ("DDP_COMPRESS=bf16", _SENDS, _sent(0, 0), False),  # nothing is sent
        ("DDP_DISABLE_GC=1", _recomputing(False, False), {"layer_calls": 2}, True),
        ("DDP_DISABLE_GC=0", _recomputing(True, True), {"layer_calls": 4}, True),
        # Said, and nothing is computed again; or done, and not said.
        ("DDP_DISABLE_GC=0", _recomputing(True, True), {"layer_calls": 2}, False),
        ("DDP_DISABLE_GC=0", _recomputing(True, False), {"layer_calls": 2}, False),
        ("DDP_DISABLE_GC=1", _recomputing(False, False), {"layer_calls": 4}, False),
    ],
)
def test_a_toggle_took_effect_where_it_shows(
    word: str, engine: dict[str, Any], more: dict[str, Any], took: bool | None
) -> None:
    name, _, value = f"NSA_{word}".partition("=")
    assert effects._judge(name, seen({name: value}, engine, **more))[0] is took


def test_safe_mode_is_all_of_its_consequences() -> None:
    took, evidence = effects._judge("NSA_DDP_SAFE_MODE", seen({"NSA_DDP_SAFE_MODE": "1"}))
    assert took is True
    assert evidence == {**SAFE_MODE, "gradient_as_bucket_view": False}


SHAPE = NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, l=4, d=2, l_sel=4, n_sel=3, w=4)
MODEL = SimpleNamespace(cfg=SimpleNamespace(attention=SHAPE))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_one_kernel_builds_v2(version: str) -> None:
    """It is one operator, like v1's tensor, and is told from that by its name."""
    with count_ranges() as counts:
        x = random_inputs(SHAPE, 12, dtype=torch.float32, device=torch.device("meta"))[0]
        batched_sdpa(x, SHAPE, Way(kernels="triton"))
    # As if the code called itself by the other name.
    asked = SELECTION_RANGES[cast("Any", version)]
    name = SELECTION_RANGES["v2"]
    inside = counts.inside[name]
    counts = RangeCounts(entered=Counter({asked: counts.entered[name]}))
    counts.inside[asked] = inside
    toggles = {"NSA_SEL_RANGES_V2": "1" if version == "v2" else "0"}
    looked = seen(toggles, {"model": MODEL}, ranges=counts)
    took, evidence = effects._ranges(looked)
    assert took is (version == "v2")
    assert evidence["ran"] == ["v2"] and evidence["operators_per_call"] == [1]


@pytest.mark.parametrize(
    ("value", "ran", "took"),
    [("1", "core", True), ("1", "bmm", False), ("0", "bmm", True), ("0", "core", False),
     ("auto", "bmm", True), ("auto", "core", True)],
)  # fmt: skip
def test_the_triton_kernels_are_known_by_their_operator(value: str, ran: str, took: bool) -> None:
    way = "sdpa" if ran == "bmm" else "triton"
    choice = PathChoice(value=way, reason="chosen")
    dispatch = SimpleNamespace(selected=lambda _: choice)
    asked = seen({"NSA_USE_TRITON_SEL": value}, {"dispatch": dispatch})
    asked.ranges.inside[ATTEND_RANGE][ran] = 1
    told = {"ran": way, "chosen": str(choice)}
    # Where the choice is left to the trainer, a row has to say that the slow way runs.
    told |= {"instead": "sdpa (chosen)"} if (value, way) == ("auto", "sdpa") else {}
    assert effects._triton(asked) == (took, told)


def _stepped(device: str, **how: Any) -> Seen:
    """The first update of a plain optimizer, whose parameters are said to lie on that device."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter], **how)
    with OperatorCount() as operators:
        optimizer.step()
    engine = {"optimizer": optimizer, "device": torch.device(device)}
    return seen({"NSA_OPT_FUSED": "0"}, engine, update=dict(operators.names))


def test_plain_is_many_tensors_at_once_on_a_gpu_and_one_by_one_on_a_cpu() -> None:
    """With fused=None torch takes foreach on CUDA by itself, with fused=False it takes neither."""
    assert effects._fused(_stepped("cuda", foreach=True))[0] is True
    for how in ({"fused": False}, {"foreach": False}, {}):
        assert effects._fused(_stepped("cpu", **how))[0] is True
        assert effects._fused(_stepped("cuda", **how))[0] is False
    fused = replace(_stepped("cpu", fused=True), toggles=parse_toggles({"NSA_OPT_FUSED": "1"}))
    assert effects._fused(fused)[0] is True
    # The groups say so, but the kernel that makes them so was not among the operators.
    assert effects._fused(replace(fused, update={}))[0] is False
    # fp16's scaler leaves a first step out: nothing ran, which shows no loop.
    assert effects._fused(replace(_stepped("cuda"), update={}))[0] is True


def event(begin: float, end: float, name: str, kind: str = HOST) -> Recorded:
    return Recorded(begin_us=begin, end_us=end, name=name, kind=kind)


STEP = [
    event(0, 100, "nsa.win"),
    event(10, 40, "aten::mm"),
    event(20, 30, "cudaLaunchKernel"),
    event(50, 60, "aten::add"),
    event(35, 95, "ampere_gemm", WORK),
    event(35, 95, "nsa.win", DEVICE_RANGE),
]


def test_a_range_counts_once_and_python_is_what_is_in_no_operator_of_the_host() -> None:
    found = summarize(STEP, 1)
    assert found["ranges"] == {"nsa.win": {"count": 1, "cpu_us": 100, "cuda_us": 60}}
    assert (found["wall_us"], found["python_share"]) == (100, 0.6)
    assert summarize([], 1)["python_share"] == 0


def test_what_the_device_waits_for() -> None:
    """Idle from 95 to 120 and from 130 to 150; operators are in 97-99, 118-135 and 145-150."""
    more = [
        event(97, 99, "aten::add"),
        event(118, 135, "aten::mm"),
        event(120, 130, "gemm", WORK),
        event(122, 125, "other stream", WORK),
        event(145, 170, "aten::mm"),
        event(150, 160, "gemm", WORK),
    ]
    assert summarize([*STEP, *more], 1)["gpu"] == {
        "window_us": 125,
        "busy_us": 80,
        "idle_us": 45,
        "python_wait_us": 45 - 2 - 2 - 5 - 5,
    }
    assert summarize([STEP[1]], 1)["gpu"] is None


# How Kineto names what is on a device's timeline, where torch tells.
ON_DEVICE = {
    "kernel": WORK,
    "gpu_memcpy": WORK,
    "gpu_memset": WORK,
    "gpu_user_annotation": DEVICE_RANGE,
}


@pytest.mark.parametrize(
    ("device", "kinds"),
    [("cpu", {HOST}), pytest.param("cuda", {HOST, WORK, DEVICE_RANGE}, marks=pytest.mark.gpu)],
)
def test_kinds_are_those_of_kineto_where_torch_tells_them(device: str, kinds: set[str]) -> None:
    with torch_profiler(device) as profiler, torch.profiler.record_function("nsa.win"):
        torch.ones(64, device=device).add(1).sum().item()
    found = recorded(profiler)
    for row, own in zip(found, profiler.kineto_results.events(), strict=True):
        if hasattr(own, "activity_type"):
            assert row.kind == ON_DEVICE.get(own.activity_type(), HOST), own.activity_type()
    assert {row.kind for row in found} == kinds


@pytest.mark.parametrize(
    ("device", "annotation", "kind"),
    [
        (DeviceType.CPU, False, HOST),
        (DeviceType.CPU, True, HOST),
        (DeviceType.CUDA, False, WORK),
        (DeviceType.CUDA, True, DEVICE_RANGE),
    ],
)
def test_the_kind_of_an_event(device: DeviceType, annotation: bool, kind: str) -> None:
    """By what torch's event says of itself in the versions that do not name its kind."""
    said = {"name": "nsa.win", "device_type": device, "is_user_annotation": annotation}
    said |= {"start_ns": 1000, "end_ns": 3000}
    own = SimpleNamespace(**{name: partial(lambda it: it, value) for name, value in said.items()})
    (found,) = recorded(SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: [own])))
    assert (found.kind, found.begin_us, found.end_us) == (kind, 1.0, 3.0)
