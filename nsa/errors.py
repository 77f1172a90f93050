"""Errors that a user of the package can cause and fix."""

from __future__ import annotations


class NSAError(ValueError):
    """A wrong value from the caller; the message names it, the allowed values and the remedy."""
