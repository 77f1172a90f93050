"""The trainer. Start it with `python -m nsa.train` or `torchrun ... -m nsa.train`.

To be read in this order: `session` (a launch from start to exit code), `loop` (its steps),
`engine` with `ddp` and `optimizer` (one step), `step_sync` and `settle` (what the ranks agree on,
and its row), `record`, `clock`, `evaluation`, and `checkpoint`. How it is started is in
`nsa.launch`, which kernels it runs in `nsa.kernels`, and what watches it in `nsa.witness`.

Importing this package costs nothing: torch is loaded after the command line has been checked.
"""
