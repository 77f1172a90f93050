"""The self-test in the trainer: what it bars, what it writes down, and that it leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import attention as api
from nsa.attention import sdpa
from nsa.data.source import Batch
from nsa.launch.envfile import policies
from nsa.launch.ranks import Ranks
from nsa.settings import ConfigError
from nsa.step.engine import Engine, allow_tf32
from nsa.witness.self_test import SelfTest, SelfTestError, self_test
from tests.attention.flash_on_cpu import flash_on_cpu
from tests.train.engines import planned
from tests.train.launching import run, schedule

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


def windows(engine: Engine) -> set[str]:
    engine.configure(engine.plan.toggles)
    return {layer.attention.way.kernels for layer in engine.model.layers}


def test_what_agrees_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    engine = engine_of()
    with flash_on_cpu() as flash:
        assert windows(engine) == {"masked"}, "never before it was tested"
        found = self_test(engine)
        assert windows(engine) == {"varlen"}
        assert engine.dispatch.window(engine.plan.toggles).reason.startswith("varlen_attn of torch")
    assert list(found.paths) == ["varlen"] and engine.dispatch.tested == ("varlen",)
    w, seq_len = engine.model.cfg.attention.w, engine.plan.config.train.seq_len
    assert flash.windows == [(w - 1, 0)] and flash.shapes[0][0][0] == seq_len
    assert "[self-test] varlen: agrees, off by at most 0.00" in capfd.readouterr().err


def test_what_another_rank_rejected_is_written_by_rank_0_as_well() -> None:
    """env.json is of rank 0: a kernel that is wrong on another GPU alone must not agree there."""
    engine = engine_of()

    class Other(Ranks):
        """Another rank raises the first flag that is asked for."""

        asked = 0

        def any(self, flag: bool) -> bool:
            Other.asked += 1
            return flag or Other.asked == 1

    engine.ranks = Other(place=engine.plan.place, device=CPU, grouped=False)
    with flash_on_cpu():
        document = self_test(engine).describe()
        assert windows(engine) == {"masked"}
    varlen = document["paths"]["varlen"]
    assert varlen["agrees"] is False and varlen["refused"] is None
    assert varlen["problems"] == ["another rank found that it does not agree"]
    assert document["paths"]["cpu_masked"]["agrees"] is True


@pytest.mark.parametrize("shift", [-1, 1])
def test_what_disagrees_is_not_used(shift: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A kernel whose window is wrong by one: masked SDPA takes its place, and all of it is said."""
    engine = engine_of()
    with flash_on_cpu(shift=shift):
        found = self_test(engine)
        assert windows(engine) == {"masked"}
        choice = engine.dispatch.window(engine.plan.toggles)
    assert choice.value == "masked"
    assert choice.reason.startswith("the self-test rejected varlen: out is off by 0.")
    document = json.loads(json.dumps(found.describe()))
    assert document["ran"] and document["dtype"] == "bfloat16" and document["seq_len"] == 128
    rejected = document["paths"]["varlen"]
    assert not rejected["agrees"] and rejected["whole"]["k_win"] > document["bound"]["whole"]
    assert rejected["seconds"] > 0 and rejected["refused"] is None
    # What takes its place was tested too: on a CPU that is its own path.
    assert [name for name in document["paths"] if document["paths"][name]["agrees"]] == [
        "cpu_masked"
    ]
    said = capfd.readouterr().err
    assert "[self-test] varlen: out is off by" in said and "[self-test] cpu_masked: agrees" in said


def test_what_cannot_run_is_not_used() -> None:
    """A build that has the operator, but not its backward."""
    engine = engine_of()
    with flash_on_cpu() as flash, pytest.MonkeyPatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("no kernel image is available")

        patch.setattr(type(flash), "_pieces", refuse)
        found = self_test(engine)
        assert windows(engine) == {"masked"}
    assert found.describe()["paths"]["varlen"]["refused"] == "no kernel image is available"


def test_what_takes_the_place_of_ours_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash for the window is wanted only once Triton's kernels turn out not to run."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(api, "triton_problem", lambda *_: None)
    monkeypatch.setattr(sdpa, "_by_kernels", refuse)
    engine = engine_of(USE_TRITON_SEL="auto")
    with flash_on_cpu():
        paths = self_test(engine).describe()["paths"]
        assert windows(engine) == {"varlen"}
    assert paths["triton"]["refused"] == "no kernel image is available"
    assert paths["varlen"]["agrees"] and len(paths) == 2
    told = engine.dispatch.selected(engine.plan.toggles)
    assert told.value == "sdpa" and "rejected triton: it could not run" in told.reason


@pytest.mark.parametrize("toggle", ["SDPA_NO_FLASH", "NONE"])
def test_no_other_way_is_left(toggle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked SDPA, or the CPU's own path, that computes something else: nothing is trained."""
    engine = engine_of("fp32", **({toggle: "1"} if toggle != "NONE" else {}))
    for name in ("batched_sdpa", "batched_cpu"):
        plain = getattr(api, name)

        def wrong(*args: Any, plain: Any = plain, **given: Any) -> Any:
            out, blocks = plain(*args, **given)
            return out * 1.001, blocks

        monkeypatch.setattr(api, name, wrong)
    with pytest.raises(SelfTestError, match=r"does not compute the equations .* Nothing was train"):
        self_test(engine)


def test_off_means_that_nothing_untested_runs() -> None:
    engine = engine_of(SELF_TEST="off")
    with flash_on_cpu() as flash:
        found = self_test(engine)
        assert windows(engine) == {"masked"}
        assert (
            engine.dispatch.window(engine.plan.toggles).reason == "no self-test (NSA_SELF_TEST=off)"
        )
    assert not found.describe()["ran"] and flash.windows == []


@pytest.mark.parametrize(
    ("toggles", "why"),
    [
        ({"WINDOW": "varlen", "SELF_TEST": "off"}, "nothing runs untested"),
        ({"WINDOW": "varlen", "SDPA_NO_FLASH": "1"}, "flash kernels are switched off"),
        ({"WINDOW": "varlen", "PREFILL_BATCHED": "0"}, "nothing runs untested"),
    ],
)
def test_asked_for_by_name_but_impossible(toggles: dict[str, str], why: str) -> None:
    with flash_on_cpu(), pytest.raises(ConfigError, match=why):
        self_test(engine_of(**toggles))


def test_an_arm_gets_the_way_that_was_tested() -> None:
    """All ways that the blocks of a schedule want are tested, and each block gets its own."""
    settings = ({"NSA_WINDOW": "masked"}, {"NSA_WINDOW": "auto"}, {"NSA_SDPA_NO_FLASH": "1"})
    arms = [(f"arm {number}", 1, toggles) for number, toggles in enumerate(settings)]
    engine = engine_of(arms=schedule(*arms, warmup_steps=0))
    with flash_on_cpu():
        assert list(self_test(engine).paths) == ["varlen", "cpu_masked"]
        values = [engine.dispatch.window(block.toggles).value for block in engine.plan.blocks]
    assert values == ["masked", "varlen", "masked"]


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


@pytest.mark.slow
def test_a_launch_writes_it_down(tmp_path: Path) -> None:
    """Through the front door: two ranks, log and env.json."""
    args = ["--dataset", "synthetic", "--ddp", "1", "--steps", "1"]
    launch = run(tmp_path, args, ranks=2, toggles={**ON, "NSA_WINDOW": "auto"})
    attention = launch.env()["attention"]
    assert attention["window"]["value"] == "masked"
    assert attention["selected"]["value"] == "sdpa"
    assert "no flash attention for device cpu" in attention["window"]["reason"]
    tested = attention["self_test"]
    assert tested["ran"] and tested["paths"]["cpu_masked"]["agrees"]
    assert set(tested["paths"]["cpu_masked"]["whole"]) >= {"out", "q", "k_win", "gates"}
    said = launch.text()
    assert "[window] masked (" in said and "[self-test] cpu_masked: agrees" in said
    policies = launch.env()["policies"]
    assert policies["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert policies["sdpa_kernels"] == dict.fromkeys(("flash", "efficient", "cudnn", "math"), True)
    effects = launch.effects()
    assert effects["NSA_SELF_TEST"]["took_effect"] is True
    assert effects["NSA_WINDOW"]["evidence"]["ran"] == "masked"


def test_tf32_is_allowed_in_products_and_in_cudnn(
    precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requirement E17; the H100 that was measured said the same of both."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    allow_tf32()
    found = policies()
    assert found["tf32_matmul"] is True and found["tf32_cudnn"] is True


def test_the_document_of_a_test_that_did_not_run(tmp_path: Path) -> None:
    found: SelfTest = self_test(engine_of(SELF_TEST="auto"))
    document = found.describe()
    assert document["ran"] is False and document["paths"] == {}
    assert document["reason"].startswith("device cpu")
