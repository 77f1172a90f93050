"""What holds for all tests: an example may take its time, because the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

# Hypothesis fails an example that takes over 200 ms. Several tests at a time on a few cores do that
# to any of them, and no test here means to say how fast something is.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
