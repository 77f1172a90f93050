"""Proofs of decoding by Triton kernels in the interpreter: what is wrong, by proof, as JSON.

    TRITON_INTERPRET=1 python -m tests.attention.decode_in_interpreter NAME ...

The truth is the independent NumPy reference's last position, and `decode_step` as it runs anywhere.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

import nsa.attention.decode as stepping
from nsa import NSAConfig
from nsa.attention import KVCache, decode_step
from nsa.attention.triton.decode import launch as decode_launch
from tests.attention.defects import defects
from tests.attention.equations import Result, Shape
from tests.attention.equations import nsa as equations
from tests.attention.space import NAMES, Example, examples, rounded
from tests.attention.triton_kernels import BOUND, compare, planted, poisoned, written_once

HALF = torch.float16
_PRODUCTION = Shape(groups=2, heads=6, d_k=64, d_v=64, l=32, d=16, lp=64, n=4, w=64)
_ODD = Shape(groups=2, heads=3, d_k=24, d_v=8, l=6, d=3, lp=6, n=4, w=21)
_WIDE = Shape(groups=1, heads=16, d_k=128, d_v=128, l=16, d=8, lp=16, n=5, w=30)


def _at(shape: Shape, seq_len: int, *, batch: int = 1, seed: int = 0) -> Example:
    return Example(shape=shape, batch=batch, seq_len=seq_len, compressed=False, seed=seed)


# Fewer tokens than a compression block, blocks that are cut, fewer blocks than are chosen and more.
CORE = (
    (_at(_ODD, 1), torch.float32),
    (_at(_ODD, 10, batch=2), torch.float32),
    (_at(_ODD, 74, batch=2), torch.float32),
)


def filled(example: Example, dtype: torch.dtype) -> tuple[Tensor, KVCache, Result]:
    """The last query, a cache of all tokens, and the truth of that query."""
    numbers = rounded(example.numbers(), dtype)
    x = {name: torch.tensor(numbers[name], dtype=dtype) for name in NAMES}
    cache = KVCache(example.config())
    for t in range(example.seq_len):
        now = {name: value[:, t : t + 1] for name, value in x.items() if name != "q"}
        cache.append(**now)
    return x["q"][:, -1:], cache, equations(numbers, example.shape)


def wrong(example: Example, dtype: torch.dtype, launch: ModuleType = decode_launch) -> list[str]:
    """Blocks and output of the last token by the kernels, and by what runs anywhere."""
    q, cache, truth = filled(example, dtype)
    if truth.margin < 1e-5:
        return []
    problems: list[str] = []
    cfg: NSAConfig = example.config()
    with written_once(problems), poisoned():
        out, blocks = launch.decode_token(cache.seen_by_last(q), cfg)
    for b in range(example.batch):
        for g in range(example.shape.groups):
            mine = sorted(int(j) for j in blocks[b, 0, g] if j >= 0)
            if mine != truth.blocks[b][-1][g]:
                problems.append(f"blocks {mine}, not {truth.blocks[b][-1][g]}: {example}")
    right = torch.from_numpy(truth.out[:, -1:])
    problems += compare(f"{example}", out.double(), right, BOUND[dtype])
    other = decode_step(q, cache, cfg).double()
    return problems + compare("decode_step", out.double(), other, 2 * BOUND[dtype])


def core(launch: ModuleType = decode_launch) -> list[str]:
    """What a launching module computes wrongly, up to the first case that shows it."""
    for example, dtype in CORE:
        problems = wrong(example, dtype, launch)
        if problems:
            return problems
    return []


def decode_values() -> list[str]:
    """The cases that defects are judged by, and the production's widths in float16."""
    problems = core()
    for shape, length in ((_PRODUCTION, 193), (_PRODUCTION, 256), (_WIDE, 120)):
        problems += wrong(_at(shape, length), HALF)
    return problems


def decode_space() -> list[str]:
    """Shapes drawn at random."""
    problems: list[str] = []

    @settings(
        max_examples=8, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(examples(longest=40))
    def run(example: Example) -> None:
        if not example.compressed:
            problems.extend(wrong(example, torch.float32))

    run()
    return problems


def decode_stepwise() -> list[str]:
    """The last steps of a sequence by decode_step's own argument, many parts of compressed keys."""
    example = _at(_ODD, 40, seed=3)
    cfg, problems = example.config(), []
    x = {n: torch.tensor(v, dtype=torch.float32) for n, v in example.numbers().items()}
    cache = KVCache(cfg)
    with mock.patch.object(decode_launch, "part_keys", lambda _: 4):
        for t in range(40):
            now = {name: value[:, t : t + 1] for name, value in x.items()}
            q = now.pop("q")
            cache.append(**now)
            if t < 28:
                continue
            both = [decode_step(q, cache, cfg, selected=way) for way in ("triton", "sdpa")]
            problems += compare(f"step {t}", both[0].double(), both[1].double(), 1e-5)
    return problems


def decode_operator() -> list[str]:
    """torch's own checks of an operator, and one graph for torch.compile."""
    q, cache, _ = filled(_at(_ODD, 30), torch.float32)
    x, cfg = cache.seen_by_last(q), cache.cfg
    given_ = [x.q, x.gates, x.k_cmp, x.v_cmp, x.k_sel, x.v_sel, x.k_win, x.v_win]
    numbers = (cfg.l, cfg.d, cfg.l_sel, cfg.n_sel)
    said = torch.library.opcheck(
        decode_launch.decode, (*[t.contiguous() for t in given_], *numbers), raise_exception=False
    )
    problems = [f"{name}: {text}" for name, text in said.items() if text != "SUCCESS"]
    compiled = torch.compile(decode_launch.decode, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(*given_, *numbers), decode_launch.decode(*given_, *numbers), strict=True)
    return problems + ["compiled"] * any(not torch.equal(a, b) for a, b in pairs)


def decode_reads_what_it_is_told() -> list[str]:
    """The step takes the kernels where they are asked for, and its own way where not."""
    q, cache, _ = filled(_at(_ODD, 30), torch.float32)
    calls: list[int] = []
    with mock.patch.object(
        stepping,
        "decode_token",
        lambda *given: calls.append(1) or decode_launch.decode_token(*given),
    ):
        for way, wanted in (("sdpa", 0), ("triton", 1)):
            decode_step(q, cache, cache.cfg, selected=way)
            if len(calls) != wanted:
                return [f"selected={way!r}: {len(calls)} calls of the kernels"]
    return []


def mutant(name: str) -> list[str]:
    """What is seen of a planted defect."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _other_operator(name):
            return core(
                planted(Path(folder), name, *defects("decode")[name], launcher="decode.launch")
            )


def _other_operator(name: str) -> Any:
    """The copy registers an operator too: under a name of its own."""
    make = torch.library.custom_op
    return mock.patch.object(
        torch.library, "custom_op", lambda of, **more: make(of.replace("::", f"::{name}_"), **more)
    )


_ALL: tuple[Callable[..., list[str]], ...] = (
    decode_values, decode_space, decode_stepwise, decode_operator, decode_reads_what_it_is_told,
)  # fmt: skip
PROOFS: dict[str, Any] = {one.__name__: one for one in _ALL}
PROOFS |= {name: partial(mutant, name) for name in defects("decode")}


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(json.dumps({wanted: PROOFS[wanted]()}), flush=True)
