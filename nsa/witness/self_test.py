"""Before the first step: do this device's kernels compute attention as the equations say?

The kernels by which attention is to run are measured at the launch's own length, heads and type.
Those that do not agree are barred on all ranks, and what takes their place is measured as well,
masked SDPA at last; where that does not agree either, nothing is trained.

`measure` runs a path forward and backward on random inputs and holds it against the equations in
float64 (`equations`). The path's own blocks are given to them, and judged by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.attention import attend, choose_path
from nsa.attention.branches import Branches
from nsa.config import Kernels, NSAConfig
from nsa.contract import ELSEWHERE
from nsa.launch.asked import triton_asked
from nsa.launch.output import say
from nsa.rounding import FLOAT32_SUMS, Gap, error_of, or_null
from nsa.settings import refusal
from nsa.step.compiled import Refused
from nsa.step.dispatch import UNTESTED, allow_kernels
from nsa.step.engine import Engine
from nsa.toggles import ToggleSet
from nsa.witness.equations import equations

Run = Callable[[Branches], tuple[Tensor, Tensor]]

# The longest chain of roundings to the type between inputs and a result: scores' gradient,
# probabilities, a branch, its gate, the result itself.
_ROUNDINGS = 5
# Scores that choose blocks are sums of about a thousand float32 products and exponentials: 32
# roundings of 2^-24. The 10 bits of TF32 are off by five times that.
_SCORES = 32 * 2.0**-24
# One row (a head of one token) holds few numbers, so that its roundings need not average out, and
# a difference of nearly equal numbers keeps the roundings of both.
_ROW = 8


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What rounding explains, as shares: over a whole tensor, in its worst row, of scores."""

    whole: float
    row: float
    scores: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Bound:
        """Of a type with unit roundoff u: 5 u, all roundings in one direction, and 8 x that."""
        whole = max(_ROUNDINGS * torch.finfo(dtype).eps / 2, FLOAT32_SUMS)
        return cls(whole=whole, row=_ROW * whole, scores=_SCORES)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Errors of one path by tensor, as shares of what is right (root mean squares).

    whole: over the tensor. row: of its worst row. blocks_illegal: queries whose blocks break the
    rules. blocks_shortfall: the most by which a block that was left out scores above one that was
    taken, as a share of its score. refused: why the path could not run at all.
    """

    bound: Bound
    whole: dict[str, float] = field(default_factory=dict)
    row: dict[str, float] = field(default_factory=dict)
    blocks_illegal: int = 0
    blocks_shortfall: float = 0.0
    refused: str | None = None
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """What is beyond its bound, in words; empty where the path agrees. NaN is beyond."""
        if self.refused is not None:
            return [f"it could not run: {self.refused}"]
        of_each = (self.whole, self.bound.whole, ""), (self.row, self.bound.row, " in one row")
        found = [
            f"{name} is off by {error:.2g} of itself{where}, allowed {limit:.2g}"
            for errors, limit, where in of_each
            for name, error in errors.items()
            if Gap(what=name, error=error, allowed=limit).too_wide
        ]
        if self.blocks_illegal:
            found.append(f"{self.blocks_illegal} choices of blocks break the rules")
        if not self.blocks_shortfall <= self.bound.scores:
            found.append(
                f"a block was left out that scores {self.blocks_shortfall:.2g} above one that was "
                f"taken, allowed {self.bound.scores:.2g}"
            )
        return found


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
    cfg, way = engine.model.cfg.attention, engine.dispatch.way_of(engine.plan.toggles, name)
    on_cpu = name == "masked" and not way.by_sdpa(engine.device.type)
    label = choose_path(cfg, found.seq_len).value if on_cpu else name
    here = found.paths[label] = measure(
        partial(attend, cfg=cfg, way=way),
        cfg,
        found.seq_len,
        dtype=engine.dtype,
        device=engine.device,
    )
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


def random_inputs(
    cfg: NSAConfig, seq_len: int, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Branches, Tensor]:
    """Inputs of one sequence and a gradient of the output [1,S,H,Dv]; equal on every device.

    They come from a generator of their own: the process's random numbers stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(device, dtype)

    rows, groups = cfg.n_compressed(seq_len), cfg.n_kv_groups
    found = {"q": normal(seq_len, cfg.n_heads, cfg.d_k)}
    for branch in ("cmp", "sel", "win"):
        length = rows if branch == "cmp" and cfg.phi == "mlp" else seq_len
        found[f"k_{branch}"] = normal(length, groups, cfg.d_k)
        found[f"v_{branch}"] = normal(length, groups, cfg.d_v)
    found["gates"] = normal(seq_len, cfg.n_heads, 3).sigmoid()
    return Branches(**found), normal(seq_len, cfg.n_heads, cfg.d_v)


def measure(
    run: Run, cfg: NSAConfig, seq_len: int, *, dtype: torch.dtype, device: torch.device
) -> Agreement:
    """Run a path (inputs to output [1,S,H,Dv] and blocks [1,S,G,n]) and hold it to the equations.

    A RuntimeError of the path, such as torch's where no kernel fits, is the answer `refused`;
    a lack of memory is raised.
    """
    begin, bound = time.perf_counter(), Bound.of(dtype)
    x, grad = random_inputs(cfg, seq_len, dtype=dtype, device=device)
    leaves = {name: value.requires_grad_() for name, value in x.named().items()}
    try:
        # Kernels without dropout draw no random numbers; one that does must not change the run's.
        kept = torch.random.fork_rng(devices=[] if device.type == "cpu" else [device])
        with kept, torch.enable_grad():
            out, blocks = run(x)
            # What a path does not depend on is 0, which is right only before any block.
            grads = torch.autograd.grad(out, list(leaves.values()), grad, materialize_grads=True)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        text = " ".join(str(error).split())[:300]
        return Agreement(bound=bound, refused=text, seconds=time.perf_counter() - begin)
    got = {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
    truth, illegal, shortfall = equations(x, grad, blocks, cfg)
    errors = {name: error_of(got[name], right) for name, right in truth.items()}
    return Agreement(
        bound=bound,
        whole={name: error.whole for name, error in errors.items()},
        row={name: error.row for name, error in errors.items()},
        blocks_illegal=illegal,
        blocks_shortfall=shortfall,
        seconds=time.perf_counter() - begin,
    )
