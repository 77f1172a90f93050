"""Fire drills: real faults in real runs, and whether they are noticed as promised.

Nothing is imported here: `plant` runs inside the ranks, which need neither the harness nor pandas.
"""
