"""Processes: how they are started, and what makes certain that none outlives the harness."""
