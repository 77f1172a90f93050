"""The watchdog under the name that the documents type: `runbook watch DIR` for `--dir DIR`."""

import sys

from _own_python import take

take()

from runbook.cli import main  # noqa: E402 - with the environment that has it

words = [word.removeprefix("--dir=") for word in sys.argv[1:] if word != "--dir"]
sys.exit(main(["watch", *words]))
