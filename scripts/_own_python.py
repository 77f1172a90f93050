"""`runbook` for the scripts of the documents, in the checkout's `.venv` where this Python lacks it.

Read by old Pythons too: it says what to do where there is no such environment.
"""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NEEDED = ("nsa", "runbook", "pydantic", "torch")


def take() -> None:
    """Go on in the checkout's environment unless this Python has everything; else exit with 2."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    own = ROOT / ".venv"
    if (own / "bin/python").is_file() and Path(sys.prefix).resolve() != own.resolve():
        python = str(own / "bin/python")
        os.execv(python, [python, *sys.argv])  # noqa: S606 - the checkout's own
    lacks = "{} lacks {}".format(sys.executable, ", ".join(missing))
    todo = f"`make demo` in {ROOT} makes .venv there, which is then taken"
    print(f"{lacks}: {todo}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    take()
    from runbook.cli import main

    sys.exit(main(sys.argv[1:]))
