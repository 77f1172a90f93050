"""What a start loads."""

from __future__ import annotations

import subprocess
import sys

from tests.train.launching import environment


def test_start_up_loads_only_what_is_used() -> None:
    code = (
        "import sys, nsa.train.session\n"
        "heavy = {'tensorboard', 'datasets', 'tiktoken', 'pyarrow', 'pandas', 'scipy', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
