"""The trainer. Start it with `python -m nsa.train` or `torchrun ... -m nsa.train`.

To be read in this order: `session` (a launch from start to exit code), `loop` (its steps),
`settle` (from a step or an evaluation to its row), and of checkpoints `checkpoint` (written beside
the steps) and `restore` (read back, and gone on from). What one step is made of is in `nsa.step`,
how the trainer is started in `nsa.launch`, what watches it in `nsa.witness`.

Importing this package costs nothing: torch is loaded after the command line has been checked.
"""
