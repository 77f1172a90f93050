"""The machine: host, checkout, GPUs, kernel log and surroundings, as they are.

A collector reads or asks and never judges; whatever a machine lacks is a fact with its reason.
"""
