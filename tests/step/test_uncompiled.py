"""A process that compiles nothing does without torch's compiler, and gets it when it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.train.launching import environment

# DDP on one rank, and an optimizer that makes a step, is saved and is read back.
TRAIN = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
if len(sys.argv) > 1:
    from nsa.step.uncompiled import leave_out_compiler
    leave_out_compiler()
torch.manual_seed(3)
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print([value.tolist() for value in model.state_dict().values()])
print("torch._dynamo.convert_frame" in sys.modules, "sympy" in sys.modules)
"""
ASKS = {
    "torch.compile": (
        "torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1)).item()",
        "2.0",
    ),
    "a part": ("importlib.import_module('torch._dynamo.config').verify_correctness", "False"),
    "a name of a part": ("len(torch._dynamo.utils.counters)", "0"),
    "a decorator": ("torch._dynamo.disable(recursive=False)(abs)(-2)", "2"),
    "another name": ("torch._dynamo.is_compiling()", "False"),
}


def _printed(code: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment({}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_trains_alike_without_the_compiler() -> None:
    weights, loaded = _printed(TRAIN, "without")
    assert loaded == "False False"
    assert _printed(TRAIN) == [weights, "True True"]


@pytest.mark.parametrize(("ask", "answer"), ASKS.values(), ids=list(ASKS))
def test_whoever_asks_for_the_compiler_gets_it(ask: str, answer: str) -> None:
    code = f"""
import importlib, torch
from nsa.step.uncompiled import is_left_out, leave_out_compiler
leave_out_compiler()
before = is_left_out()
print({ask})
import sys, torch._dynamo, torch._dynamo.config
whole = torch._dynamo.config is sys.modules["torch._dynamo.config"]
print(before, is_left_out(), torch._dynamo is sys.modules["torch._dynamo"], whole)
"""
    assert _printed(code) == [answer, "True False True True"]
