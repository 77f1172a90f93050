"""The loader test under the name that the documents type: `python -m nsa.data.smoke`."""

import runpy

runpy.run_module("nsa.data.smoke", run_name="__main__", alter_sys=True)
