"""Preflight: what the machine, the checkout, torch and the environment are like, as facts.

A collector reads or asks and never judges; whatever a machine lacks is a fact with its reason.
"""
