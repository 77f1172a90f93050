"""One training step, and no launch: what `nsa.train` goes through and `nsa.witness` looks at.

`engine` makes it, with `ddp` and `optimizer`; `clock` says how long it took, and `sync` lets the
ranks agree on how it went. Nothing here knows who asks for the step, or who watches it.
"""
