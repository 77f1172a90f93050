"""What somebody needs who takes attention and its kernels alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALONE = """
import sys, torch
before = set(sys.modules)
import nsa.attention, nsa.attention.triton.launch
others = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(others - {"nsa", "torch", "triton"} - sys.stdlib_module_names))
"""


@pytest.mark.parametrize(("more", "told"), [("", ""), ("import rich\n", "rich")])
def test_the_core_needs_torch_alone(more: str, told: str) -> None:
    """Who takes the kernels needs nothing else that the program is installed with."""
    command = [sys.executable, "-c", ALONE.replace("others =", f"{more}others =")]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.split() == ([told] if told else [])
