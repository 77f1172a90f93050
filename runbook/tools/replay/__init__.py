"""Judge a hand-written table of results by the rules of a run."""
