"""Fast ways that are `auto`: used where they agree, left out with the reason where they do not.

The device is said to be CUDA and computes on the CPU. Our own modules stand in for what torch's
compiler and its recorder make, spoiled where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.model import mean_loss, whole
from nsa.step import compiled
from nsa.step.compiled import COMPILED_NODE, Graphs, Refused
from nsa.step.cuda_graphs import REPLAYED_NODE
from nsa.step.engine import Engine
from nsa.toggles import parse_toggles
from nsa.witness.effects import _compile, _cuda_graphs
from tests.factory.tables import table
from tests.step.test_cuda_graphs import as_they_are, scaled
from tests.train import engines
from tests.train.test_effects import seen

AUTO = {"NSA_COMPILE": "auto", "NSA_CUDA_GRAPHS": "auto"}
NAMED = {"NSA_COMPILE": "layer", "NSA_CUDA_GRAPHS": "1"}
WRONG_SLOPE = scaled(whole, 1.001)
# Ways that a CPU has, whatever device is told.
SLOW = {"NSA_USE_TRITON_SEL": "0", "NSA_PREFILL_BATCHED": "1"}


def _breaks(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image\n\nfrom user code: many lines")


def _scaled(*given: Any, **how: Any) -> Any:
    return tuple(scaled(module, 1.5) for module in as_they_are(*given, **how))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine that takes its device for CUDA, and has put the toggles in force."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def start(
        toggles: dict[str, str], layer: Any = whole, record: Any = as_they_are, **how: str
    ) -> Engine:
        monkeypatch.setattr(compiled, "compile_layers", lambda: Graphs(layer=layer, loss=mean_loss))
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
        words = ("--set", "train.seq_len=48", "--set", "runtime.gradient_checkpointing=false")
        made = engines.engine(*(how.get("words", "").split() or words), **SLOW)
        made.dispatch._device = torch.device("cuda")
        made.configure(parse_toggles({**SLOW, **toggles}))
        return made

    return start


def effects(engine: Engine, toggles: dict[str, str], **nodes: int) -> dict[str, Any]:
    """(took effect, evidence) of both toggles, for a loss with such nodes."""
    shown = replace(seen({**SLOW, **toggles}), engine=engine, unwatched=nodes)
    return {"NSA_COMPILE": _compile(shown), "NSA_CUDA_GRAPHS": _cuda_graphs(shown)}


@pytest.mark.parametrize(
    ("layer", "record", "why"),
    [
        (WRONG_SLOPE, as_they_are, {"NSA_COMPILE": "off (does not agree with our own modules"}),
        (_breaks, as_they_are, {"NSA_COMPILE": "off (cannot run here: no kernel image)"}),
        (whole, _scaled, {"NSA_CUDA_GRAPHS": "0 (does not give what the host gives"}),
        (whole, _breaks, {"NSA_CUDA_GRAPHS": "0 (cannot be recorded: no kernel image)"}),
        (whole, as_they_are, {}),
    ],
    ids=["wrong compiled", "not compiled", "wrong replay", "not recorded", "all agree"],
)
def test_what_does_not_agree_gives_way_and_says_why(
    started: Callable[..., Engine], layer: Any, record: Any, why: dict[str, str]
) -> None:
    engine = started(AUTO, layer, record)
    assert (engine.model.compiled is None) == ("NSA_COMPILE" in why)
    assert (engine.graphs is None) == ("NSA_COMPILE" in why)
    assert (engine.model.recording is None) == ("NSA_CUDA_GRAPHS" in why)
    layers = engine.plan.config.model.n_layers
    replayed = 0 if "NSA_CUDA_GRAPHS" in why else layers
    calls = 0 if "NSA_COMPILE" in why else (0 if replayed else layers) + 1
    nodes = {REPLAYED_NODE: replayed, COMPILED_NODE: calls}
    found = effects(engine, AUTO, **nodes)
    assert [found[name][0] for name in AUTO] == [True, True]
    told = {name: found[name][1]["instead"] for name in AUTO if "instead" in found[name][1]}
    assert told.keys() == why.keys()
    assert all(told[name].startswith(text) for name, text in why.items())
    # And the step trains.
    batch = engines.batch(seq_len=48)
    assert bool(torch.isfinite(engine.compute([batch]).loss))
    # What is chosen is what has to be seen: a fast way that is left out must not be at work.
    more = {name: count + 1 for name, count in nodes.items()}
    assert [effects(engine, AUTO, **more)[name][0] for name in AUTO] == [False, False]


@pytest.mark.parametrize(("layer", "record"), [(WRONG_SLOPE, as_they_are), (whole, _scaled)])
def test_what_is_asked_for_by_name_is_refused(
    started: Callable[..., Engine], layer: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.step.engine.why_not", lambda *_: None)
    with pytest.raises(Refused, match=r"does not (agree|give)"):
        started(NAMED, layer, record)


def test_all_ranks_go_the_same_way(started: Callable[..., Engine]) -> None:
    """One that found nothing goes the slow way too."""
    engine = started({})
    engine.ranks = SimpleNamespace(any=lambda _: True, rank=1, grouped=False)  # type: ignore[assignment]
    engine.model.recording = None
    toggles = parse_toggles({**SLOW, **AUTO})
    engine._use_kernels(toggles)
    engine._record(toggles)
    assert engine.model.compiled is None and engine.model.recording is None
    text = "another rank says that it cannot be used"
    assert engine.dispatch.layers(toggles).reason == engine.dispatch.replay(toggles).reason == text


@table(__file__, "not_recorded")
def test_what_cannot_be_recorded_is_not_tried(
    started: Callable[..., Engine], toggles: dict[str, str], words: str, layers: str, replay: str
) -> None:
    more = f"--set {words} --set runtime.gradient_checkpointing=true" if words else ""
    engine = started({**AUTO, **toggles}, record=_breaks, words=more)
    now = parse_toggles({**SLOW, **AUTO, **toggles})
    assert engine.dispatch.layers(now).value == layers
    assert str(engine.dispatch.replay(now)).startswith(replay)
    assert engine.model.recording is None and engine.model.compiled is whole


@pytest.mark.parametrize("name", ["NSA_SDPA_FLASH_ONLY", "NSA_SDPA_NO_FLASH"])
def test_what_is_said_about_the_kernels_of_sdpa_is_about_sdpa(
    name: str, started: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernels that are `auto` leave the branches to it; else they run all of them."""
    engine = started({})
    engine.dispatch.barred.clear()
    monkeypatch.setattr("nsa.attention.triton_problem", lambda *_: None)
    for more, kernels in (({}, "triton"), ({name: "1"}, "masked")):
        toggles = parse_toggles({"NSA_USE_TRITON_SEL": "auto", **more})
        assert engine.dispatch.way(toggles).kernels == kernels
        assert (engine.dispatch.selected(toggles).value == "triton") == (kernels == "triton")
