"""Run record in, text out. Nothing here measures or judges."""

from __future__ import annotations
