"""Real runs, kept as they ended, and what the program says of each: the same after any refactoring.

`runs/NAME.tar.xz` is a run's folder, `NAME.json` and `NAME.md` are what `judge`, `verify`,
`inspect` and `report` say of it. `make` makes the runs anew, `accept` takes over what is said now.
"""
