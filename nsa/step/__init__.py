"""One training step, and no launch: what `nsa.train` goes through and `nsa.witness` looks at.

`engine` makes it, with `ddp` and `optimizer`; `clock` says how long it took, and `sync` lets the
ranks agree on how it went. `dispatch` says which kernels run the layers, `compiled` and
`cuda_graphs` make other ones of them and hold those against our own. Nothing here
knows who asks for the step, or who watches it.
"""
