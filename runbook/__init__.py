"""The engine: plans, launches, watches, judges and records runs. Never imports torch."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
