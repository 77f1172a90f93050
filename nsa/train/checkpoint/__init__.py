"""Checkpoints: written beside the steps, read back, kept or removed, gone on from."""
