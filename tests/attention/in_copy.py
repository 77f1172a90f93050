"""The tests of a copy of the package, in a process that has imported all but the package itself."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.forks import serve

__all__ = ["torch"]  # for the copies, which pay most for it


def outcome(folder: str, *tests: str) -> str:
    """How the tests of the copy in this folder end; what they print goes to stderr."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    for name in [one for one in sys.modules if one.partition(".")[0] == "tests"]:
        del sys.modules[name]
    words = ("-x", "-q", "--tb=no", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist")
    return pytest.ExitCode(pytest.main([*words, *tests])).name


if __name__ == "__main__":
    serve(outcome)
