"""The trainer under the name that the documents type: `python -m nsa.train`, with its flags."""

import runpy

runpy.run_module("nsa.train", run_name="__main__", alter_sys=True)
