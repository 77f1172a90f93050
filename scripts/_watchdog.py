"""The watchdog under the name that the documents type: `runbook watch DIR` for `--dir DIR`."""

import sys

from runbook.cli import main

words = [word.removeprefix("--dir=") for word in sys.argv[1:] if word != "--dir"]
sys.exit(main(["watch", *words]))
