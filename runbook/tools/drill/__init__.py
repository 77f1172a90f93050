"""Fire drills: real faults in real runs, and whether they are noticed as promised.

The faults themselves are in `nsa.inject`, which runs inside the ranks and is started by name.
"""
