"""Starts proofs in Triton's interpreter, each process one list of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def interpreted(*names: str) -> subprocess.CompletedProcess[str]:
    """These proofs of tests/attention/in_interpreter.py."""
    return subprocess.run(
        [sys.executable, "-m", "tests.attention.in_interpreter", *names],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def found(*names: str) -> dict[str, list[str]]:
    """What is wrong, by proof."""
    ran = interpreted(*names)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        told |= json.loads(line)
    assert set(told) == set(names)
    return told
