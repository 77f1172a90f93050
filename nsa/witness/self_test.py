"""Before the first step: do this device's kernels compute attention as the equations say?

The ways that the window and the selected branch are to run are measured at the launch's own
length, heads and type. One that does not agree is barred on all ranks, and masked SDPA takes its
place; where that does not agree either, nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from nsa.attention import attend, choose_path
from nsa.contract import ELSEWHERE, NSAError
from nsa.launch.arms import triton_asked
from nsa.launch.output import say
from nsa.settings import refusal
from nsa.step.dispatch import allow_kernels, forces_sdpa
from nsa.step.engine import Engine
from nsa.toggles import ToggleSet
from nsa.witness.accounts import or_null
from nsa.witness.equations import Agreement, Bound, measure

_TRITON = "triton"


class SelfTestError(RuntimeError):
    """Attention computes something else than the equations on this device."""


@dataclass(kw_only=True)
class SelfTest:
    """What was tested, or why nothing was; `paths` by the way that the window branch runs, and
    "triton" for the kernels of this package, all that blocks want of them at once.

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
    """Test the ways to run attention that this launch's blocks want. A collective of all ranks.

    Afterwards `engine.dispatch.barred` holds those that may not be used. Leaves random numbers,
    memory statistics and gradients as they were. Raises SelfTestError if masked SDPA does not
    agree, and ConfigError where a way is asked for by name that cannot run, or cannot be tested.
    """
    plan = engine.plan
    allow_kernels(plan.toggles)
    run, reason = wanted(engine, plan.toggles)
    todo = _ways(engine, run, reason)
    found = SelfTest(
        reason=reason,
        seq_len=plan.config.train.seq_len,
        dtype=str(engine.dtype).removeprefix("torch."),
        bound=Bound.of(engine.dtype),
    )
    if not run:
        engine.dispatch.barred |= dict.fromkeys(("varlen", _TRITON), f"no self-test ({reason})")
        return found
    # Last, beside the window that was found to agree.
    todo = [name for name in todo if name != _TRITON] + [_TRITON] * _wants_triton(engine)
    rejected = [name for name in todo if not _agrees(engine, found, name)]
    if rejected and "masked" not in todo:
        _agrees(engine, found, "masked")
    engine.dispatch.tested = tuple(found.paths)
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the test is no part of the training
    return found


def _ways(engine: Engine, run: bool, reason: str) -> list[str]:
    """Ways of the window that blocks want; masked, which takes a rejected one's place, last."""
    ways, problems = set(), []
    for block in engine.plan.blocks:
        try:
            ways.add(engine.dispatch.window(block.toggles, tested=False).value)
        except NSAError as error:
            problems.append(f"NSA_WINDOW: {error}")
        else:
            if block.toggles.text("NSA_WINDOW") == "varlen" and not run:
                problems.append(f"NSA_WINDOW=varlen: nothing runs untested ({reason}); use auto")
        problems += _selected_problems(engine, block.toggles, run, reason)
    if problems:
        raise refusal(list(dict.fromkeys(problems)))
    return sorted(ways, reverse=True)


def _selected_problems(engine: Engine, toggles: ToggleSet, run: bool, reason: str) -> list[str]:
    """Why the kernels that are asked for by name cannot run; an arm of its own says so itself."""
    try:
        choice = engine.dispatch.selected(toggles, tested=False)
    except NSAError as error:
        return [str(error)] if engine.plan.schedule is None else []
    asked = triton_asked(toggles, engine.plan.config.runtime.use_triton_sel)
    if asked == "1" and choice.value == _TRITON and not run:
        return [f"NSA_USE_TRITON_SEL=1: nothing runs untested ({reason}); use auto"]
    return []


def _wants_triton(engine: Engine, branch: str = "") -> bool:
    """Does a block want the Triton kernels (of a branch, "" for any), and could they run?"""
    ways = {"window": engine.dispatch.window, "selected": engine.dispatch.selected}
    for block in engine.plan.blocks:
        for name, way in ways.items():
            try:
                if branch in ("", name) and way(block.toggles, tested=False).value == _TRITON:
                    return True
            except NSAError:
                pass  # an arm that cannot run says so when its turn comes
    return False


def _agrees(engine: Engine, found: SelfTest, name: str) -> bool:
    """Measure one way, the same verdict on all ranks; bar it or raise where it does not agree."""
    by_mask = _name_of_masked(engine)
    label = by_mask if name == "masked" else name
    here = found.paths[label] = _measure(engine, name)
    wrong = engine.ranks.any(bool(here.problems))
    worst = max((*here.whole.values(), 0.0))
    outcome = "; ".join(here.problems) or f"agrees, off by at most {worst:.2g} of itself"
    say(f"[self-test] {label}: {outcome} ({here.seconds:.1f} s)", rank=engine.ranks.rank)
    if not wrong:
        engine.dispatch.barred.pop(name, None)
        return True
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
    return False


def _name_of_masked(engine: Engine) -> str:
    """Masked SDPA, or the path that a CPU takes instead of it."""
    if engine.device.type != "cpu" or forces_sdpa(engine.plan.toggles):
        return "masked"
    return choose_path(engine.model.cfg.attention, engine.plan.config.train.seq_len).value


def _measure(engine: Engine, name: str) -> Agreement:
    cfg, toggles = engine.model.cfg.attention, engine.plan.toggles
    window, selected = name, "sdpa"
    if name == _TRITON:
        # The other branch runs as it was found to agree.
        window = (
            _TRITON if _wants_triton(engine, "window") else engine.dispatch.window(toggles).value
        )
        selected = _TRITON if _wants_triton(engine, "selected") else "sdpa"
    way = engine.dispatch.way_of(toggles, window, selected)
    way = replace(way, force_sdpa=way.force_sdpa or name != "masked")
    return measure(
        partial(attend, cfg=cfg, way=way),
        cfg,
        engine.plan.config.train.seq_len,
        dtype=engine.dtype,
        device=engine.device,
    )
