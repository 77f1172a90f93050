"""The trainer. Start it with `python -m nsa.train` or `torchrun ... -m nsa.train`.

Importing this package costs nothing: torch is loaded after the command line has been checked.
"""
