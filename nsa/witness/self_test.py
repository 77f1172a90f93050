"""Before the first step: do this device's kernels compute attention as the equations say?

The kernels by which attention is to run are measured at the launch's own length, heads and type.
Those that do not agree are barred on all ranks, and what takes their place is measured as well,
masked SDPA at last; where that does not agree either, nothing is trained.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nsa.attention import attend, choose_path
from nsa.config import Kernels
from nsa.contract import ELSEWHERE
from nsa.launch.asked import triton_asked
from nsa.launch.output import say
from nsa.rounding import or_null
from nsa.settings import refusal
from nsa.step.compiled import Refused
from nsa.step.dispatch import UNTESTED, allow_kernels
from nsa.step.engine import Engine
from nsa.toggles import ToggleSet
from nsa.witness.equations import Agreement, Bound, measure


class SelfTestError(RuntimeError):
    """Attention computes something else than the equations on this device."""


@dataclass(kw_only=True)
class SelfTest:
    """What was tested, or why nothing was; `paths` by `Way.kernels`, or a CPU's own path.

    elsewhere: why a path that agrees on this rank was rejected; env.json, of rank 0, has to say it.
    """

    reason: str
    seq_len: int
    dtype: str
    bound: Bound
    paths: dict[str, Agreement] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The document of env.json."""
        return {
            "ran": bool(self.paths),
            "reason": self.reason,
            "seq_len": self.seq_len,
            "dtype": self.dtype,
            "bound": vars(self.bound),
            "paths": {
                name: _describe(found, self.elsewhere.get(name, ""))
                for name, found in self.paths.items()
            },
        }


def _describe(found: Agreement, elsewhere: str) -> dict[str, Any]:
    problems = found.problems or ([elsewhere] if elsewhere else [])
    return {
        "agrees": not problems,
        "refused": found.refused,
        "problems": problems,
        "whole": {name: or_null(value, digits=3) for name, value in found.whole.items()},
        "row": {name: or_null(value, digits=3) for name, value in found.row.items()},
        "blocks_illegal": found.blocks_illegal,
        "blocks_shortfall": or_null(found.blocks_shortfall, digits=3),
        "seconds": round(found.seconds, 3),
    }


def wanted(engine: Engine, toggles: ToggleSet) -> tuple[bool, str]:
    """Is the test to be run, and why."""
    asked = toggles.text("NSA_SELF_TEST")
    if asked == "off":
        return False, "NSA_SELF_TEST=off"
    if engine.model.cfg.way.path != "batched":
        return False, f"path {engine.model.cfg.way.path}: no fused kernels"
    if asked == "on":
        return True, "NSA_SELF_TEST=on"
    if engine.device.type == "cpu":
        return False, "device cpu: the paths of a CPU are proven by the tests of the package"
    return True, f"device {engine.device.type}"


def self_test(engine: Engine) -> SelfTest:
    """Test the kernels that this launch's blocks want. A collective of all ranks.

    Afterwards `engine.dispatch.barred` holds those that may not be used. Leaves random numbers,
    memory statistics and gradients as they were. Raises SelfTestError if masked SDPA does not
    agree, and ConfigError where kernels are asked for by name that cannot run, or be tested.
    """
    plan, barred = engine.plan, engine.dispatch.barred
    allow_kernels(plan.toggles)
    run, reason = wanted(engine, plan.toggles)
    if problems := _problems(engine, run, reason):
        raise refusal(problems)
    found = SelfTest(
        reason=reason,
        seq_len=plan.config.train.seq_len,
        dtype=str(engine.dtype).removeprefix("torch."),
        bound=Bound.of(engine.dtype),
    )
    if not run:
        barred |= dict.fromkeys(UNTESTED, f"no self-test ({reason})")
        return found
    for name in UNTESTED:
        barred.pop(name, None)
    done = set[Kernels]()
    # What takes the place of a rejected one is wanted only then.
    while left := sorted(_kernels(engine) - done):
        done.add(left[-1])
        _test(engine, found, left[-1])
    barred |= {name: why for name, why in UNTESTED.items() if name not in done}
    engine.dispatch.tested = tuple(found.paths)
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the test is no part of the training
    return found


def _problems(engine: Engine, run: bool, reason: str) -> list[str]:
    """Why what is asked for by name cannot run, or cannot be tested."""
    problems = []
    for block in engine.plan.blocks:
        toggles = block.toggles
        try:
            engine.dispatch.selected(toggles, tested=False)
        except Refused as error:
            # An arm that cannot run says so itself, when its turn comes.
            problems += [str(error)] if engine.plan.schedule is None else []
        else:
            asked = triton_asked(toggles, engine.plan.config.runtime.use_triton_sel)
            if asked == "1" and not run:
                told = f"NSA_USE_TRITON_SEL=1: nothing runs untested ({reason}); use auto"
                problems.append(told)
    return list(dict.fromkeys(problems))


def _kernels(engine: Engine) -> set[Kernels]:
    """What blocks want of what is not barred."""
    found = set[Kernels]()
    for block in engine.plan.blocks:
        with suppress(Refused):
            found.add(engine.dispatch.kernels(block.toggles))
    return found


def _test(engine: Engine, found: SelfTest, name: Kernels) -> None:
    """Measure one way, the same verdict on all ranks; bar it or raise where it does not agree."""
    by_mask = _name_of_masked(engine)
    label = by_mask if name == "masked" else name
    here = found.paths[label] = _measure(engine, name)
    wrong = engine.ranks.any(bool(here.problems))
    worst = max((*here.whole.values(), 0.0))
    outcome = "; ".join(here.problems) or f"agrees, off by at most {worst:.2g} of itself"
    say(f"[self-test] {label}: {outcome} ({here.seconds:.1f} s)", rank=engine.ranks.rank)
    if not wrong:
        return
    why = "; ".join(here.problems)
    if not why:
        why = found.elsewhere[label] = f"{ELSEWHERE} found that it does not agree"
    if name == "masked":
        raise SelfTestError(
            f"attention ({label}) does not compute the equations on this device "
            f"({engine.device}, {found.dtype}, S={found.seq_len}): {why}. Nothing was trained. Run "
            "`pytest --pyargs nsa.tests`, and check the driver, torch's build and the memory"
        )
    engine.dispatch.barred[name] = f"the self-test rejected {name}: {why}"


def _name_of_masked(engine: Engine) -> str:
    """Masked SDPA, or the path that a CPU takes instead of it."""
    if engine.dispatch.way_of(engine.plan.toggles, "masked").by_sdpa(engine.device.type):
        return "masked"
    return choose_path(engine.model.cfg.attention, engine.plan.config.train.seq_len).value


def _measure(engine: Engine, name: Kernels) -> Agreement:
    cfg = engine.model.cfg.attention
    way = engine.dispatch.way_of(engine.plan.toggles, name)
    return measure(
        partial(attend, cfg=cfg, way=way),
        cfg,
        engine.plan.config.train.seq_len,
        dtype=engine.dtype,
        device=engine.device,
    )
