"""The trainer under the name that the documents type: `python -m nsa.train`, with its flags.

Half of their lines name no config. They are about the production config, which is taken then.
"""

import os
import runpy
import sys

from _own_python import take

take()

_CONFIG = "configs/m7c_125m_2xa100_production.yaml"

if not os.environ.get("CONFIG") and not any(
    w.startswith(("--config", "-h", "--help")) for w in sys.argv
):
    os.environ["CONFIG"] = _CONFIG
    if os.environ.get("RANK", "0") == "0":
        print(f"[config] none given: CONFIG={_CONFIG}, that of the documents", flush=True)

runpy.run_module("nsa.train", run_name="__main__", alter_sys=True)
