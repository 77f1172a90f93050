"""Statistics of one training.csv, with window and provenance, and decisions at a declared error.

What enters is pure (no files, no clock, no randomness) and has its error rate on the page of
statistics; one value is the throughput of one block or launch, tokens over time, no mean of rates.
"""
