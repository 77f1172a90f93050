"""The loader test under the name that the documents type: `python -m nsa.data.smoke`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _own_python import take

take()

runpy.run_module("nsa.data.smoke", run_name="__main__", alter_sys=True)
