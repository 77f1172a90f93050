"""What watches a launch: it is handed the step's objects, and knows nothing of `nsa.train`.

`witness` is the one interface. Behind it: the proof of the first and of the last batch
(`gradient_probe`, `oracle_check` with `oracle`), drawn steps a second time (`shadow`, `recompute`),
second sources of counts (`accounts`), and whether toggles took effect (`effect_watch` with
`effects`, `profiling`). Before anything trains, `self_test` holds attention to its `equations`.
"""
