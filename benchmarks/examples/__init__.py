"""Runs that end in every way a reader should have seen: `python -m benchmarks.examples`.

Each is a real run of this machine's CPU: one healthy, the others with one thing wrong. What comes
out is kept in docs/examples.
"""
