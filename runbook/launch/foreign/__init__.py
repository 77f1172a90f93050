"""Launches of a trainer that is not ours, which writes no heartbeats that we know."""
