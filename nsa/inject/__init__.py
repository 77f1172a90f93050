"""The real trainer with one injected fault: `-m nsa.inject KIND RANK STEP -- ARGUMENTS`.

Runs inside a rank. It wraps functions of the trainer, waits for its rank and step, notes the time
in `injected.json`, and then does the real thing: a real signal, a real full disk, a real NaN. The
trainer itself knows nothing of it. torch is imported in here only where a fault needs it.
"""
