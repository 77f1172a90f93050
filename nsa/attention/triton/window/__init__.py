"""The sliding window."""
