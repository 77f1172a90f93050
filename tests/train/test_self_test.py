"""The self-test in the trainer: what it bars, what it writes down, and that it leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import attention as api
from nsa.attention import sdpa
from nsa.attention.branches import Branches
from nsa.config import NSAConfig, Way
from nsa.data import Batch
from nsa.launch.envfile import policies
from nsa.launch.ranks import Ranks
from nsa.settings import ConfigError
from nsa.step.engine import Engine, allow_tf32
from nsa.witness.self_test import SelfTestError, self_test
from tests.train.engines import planned
from tests.train.launching import schedule

ON = {"NSA_PREFILL_BATCHED": "1", "NSA_SELF_TEST": "on"}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """The engine sets them for its process; other tests must not see it."""
    yield
    for allow in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{allow}_sdp")(True)


def engine_of(precision: str = "bf16", arms: str = "", **toggles: str) -> Engine:
    words = ["--precision", precision, *(["--arms", arms] if arms else [])]
    given = {**ON, **{f"NSA_{name}": text for name, text in toggles.items()}}
    return planned(*words, **given)


def kernels_of(engine: Engine) -> set[str]:
    engine.configure(engine.plan.toggles)
    return {layer.attention.way.kernels for layer in engine.model.layers}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Masked SDPA in the place of our kernels, which can run then: `shift` moves its window."""
    stand_in = SimpleNamespace(shift=0, refusal="", lengths=[])

    def run(_: Tensor, x: Branches, cfg: NSAConfig, way: Way) -> tuple[Tensor, Tensor]:
        if stand_in.refusal:
            raise RuntimeError(stand_in.refusal)
        stand_in.lengths.append(x.q.shape[1])
        moved = replace(cfg, w=cfg.w + stand_in.shift)
        return sdpa.batched_sdpa(x, moved, replace(way, kernels="masked"))

    monkeypatch.setattr(api, "triton_problem", lambda *_: None)
    monkeypatch.setattr(sdpa, "_by_kernels", run)
    yield stand_in


WANTED = {"USE_TRITON_SEL": "auto"}


def test_what_agrees_is_used(ours: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(**WANTED)
    assert kernels_of(engine) == {"masked"}, "never before it was tested"
    found = self_test(engine)
    assert kernels_of(engine) == {"triton"}
    assert list(found.paths) == ["triton"] and engine.dispatch.tested == ("triton",)
    assert ours.lengths == [engine.plan.config.train.seq_len]
    assert "[self-test] triton: agrees, off by at most 0.00" in capfd.readouterr().err


@pytest.mark.usefixtures("ours")
def test_what_another_rank_rejected_is_written_by_rank_0_as_well() -> None:
    """env.json is of rank 0: a kernel that is wrong on another GPU alone must not agree there."""
    engine = engine_of(**WANTED)

    class Other(Ranks):
        """Another rank raises the first flag that is asked for."""

        asked = 0

        def any(self, flag: bool) -> bool:
            Other.asked += 1
            return flag or Other.asked == 1

    engine.ranks = Other(place=engine.plan.place, device=CPU, grouped=False)
    document = self_test(engine).describe()
    assert kernels_of(engine) == {"masked"}
    told = document["paths"]["triton"]
    assert told["agrees"] is False and told["refused"] is None
    assert told["problems"] == ["another rank found that it does not agree"]
    assert document["paths"]["cpu_masked"]["agrees"] is True


def test_what_disagrees_is_not_used(
    ours: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    """A kernel whose window is wrong by one: masked SDPA takes its place, and all of it is said."""
    engine, ours.shift = engine_of(**WANTED), 1
    found = self_test(engine)
    assert kernels_of(engine) == {"masked"}
    choice = engine.dispatch.selected(engine.plan.toggles)
    assert choice.value == "sdpa"
    assert choice.reason.startswith("the self-test rejected triton: out is off by 0.")
    document = json.loads(json.dumps(found.describe()))
    assert document["ran"] and document["dtype"] == "bfloat16" and document["seq_len"] == 128
    rejected = document["paths"]["triton"]
    assert not rejected["agrees"] and rejected["whole"]["k_win"] > document["bound"]["whole"]
    assert rejected["seconds"] > 0 and rejected["refused"] is None
    # What takes its place was tested too: on a CPU that is its own path.
    assert [name for name in document["paths"] if document["paths"][name]["agrees"]] == [
        "cpu_masked"
    ]
    said = capfd.readouterr().err
    assert "[self-test] triton: out is off by" in said and "[self-test] cpu_masked: agrees" in said


def test_what_cannot_run_is_not_used(ours: SimpleNamespace) -> None:
    """A build that has the operators, but not for this device."""
    engine, ours.refusal = engine_of(**WANTED), "no kernel image is available"
    paths = self_test(engine).describe()["paths"]
    assert kernels_of(engine) == {"masked"} and paths["cpu_masked"]["agrees"]
    assert paths["triton"]["refused"] == "no kernel image is available"
    told = engine.dispatch.selected(engine.plan.toggles)
    assert told.value == "sdpa" and "rejected triton: it could not run" in told.reason


def test_no_other_way_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's own path computes something else: nothing is trained."""
    engine = engine_of("fp32")
    for name in ("batched_sdpa", "batched_cpu"):
        plain = getattr(api, name)

        def wrong(*args: Any, plain: Any = plain, **given: Any) -> Any:
            out, blocks = plain(*args, **given)
            return out * 1.001, blocks

        monkeypatch.setattr(api, name, wrong)
    with pytest.raises(SelfTestError, match=r"does not compute the equations .* Nothing was train"):
        self_test(engine)


def test_off_means_that_nothing_untested_runs(ours: SimpleNamespace) -> None:
    engine = engine_of(SELF_TEST="off", **WANTED)
    found = self_test(engine)
    assert kernels_of(engine) == {"masked"}
    told = engine.dispatch.selected(engine.plan.toggles).reason
    assert told == "no self-test (NSA_SELF_TEST=off)"
    assert not found.describe()["ran"] and ours.lengths == []


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("toggle", ["SELF_TEST=off", "PREFILL_BATCHED=0"])
def test_asked_for_by_name_but_untested(toggle: str) -> None:
    name, value = toggle.split("=")
    arms = schedule(("named", 1, {"NSA_USE_TRITON_SEL": "1"}), warmup_steps=0)
    with pytest.raises(ConfigError, match="NSA_USE_TRITON_SEL=1: nothing runs untested"):
        self_test(engine_of(arms=arms, **{name: value}))


@pytest.mark.usefixtures("ours")
def test_an_arm_gets_the_way_that_was_tested() -> None:
    """All ways that the blocks of a schedule want are tested, and each block gets its own."""
    settings = [
        {"NSA_USE_TRITON_SEL": asked, "NSA_SDPA_NO_FLASH": no_flash}
        for asked, no_flash in (("0", "0"), ("auto", "0"), ("auto", "1"))
    ]
    arms = [(f"arm {number}", 1, toggles) for number, toggles in enumerate(settings)]
    engine = engine_of(arms=schedule(*arms, warmup_steps=0))
    assert list(self_test(engine).paths) == ["triton", "cpu_masked"]
    values = [engine.dispatch.kernels(block.toggles) for block in engine.plan.blocks]
    assert values == ["masked", "triton", "masked"]


def _first_loss(tested: bool) -> tuple[float, torch.Tensor]:
    engine = engine_of("fp32")
    if tested:
        self_test(engine)
    engine.configure(engine.plan.toggles)
    shape = (engine.plan.per_rank_batch, engine.plan.config.train.seq_len + 1)
    batch = Batch(tokens=torch.randint(256, shape, generator=torch.Generator().manual_seed(5)))
    outcome = engine.compute([batch])
    return float(outcome.loss), torch.rand(5)


def test_it_leaves_no_trace() -> None:
    """The first loss, and the random numbers after it, are those of a launch without the test."""
    without, numbers = _first_loss(False)
    with_it, others = _first_loss(True)
    assert without == with_it and torch.equal(numbers, others)


def test_tf32_is_allowed_in_products_and_in_cudnn(
    precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requirement E17; the H100 that was measured said the same of both."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    allow_tf32()
    found = policies()
    assert found["tf32_matmul"] is True and found["tf32_cudnn"] is True
